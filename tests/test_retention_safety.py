"""What `reap` must never take, whatever looks like a generation or like a complete one."""

from __future__ import annotations

import pytest

from retainzfs.volume import ROOT, Options, Volume
from tests.helpers import Clock, formatted, mounted, noise, put, small_device
from tests.test_retention import archive, closed, directory, opened, states
from tests.test_retention_cases import checkpoint, names, settled

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(3)]

LINK = 0o120777
LARGE = noise(1 << 20)


async def reaping(volume: Volume, keep: bytes = b"1") -> None:
    await volume.setxattr(ROOT, b"user.retainz.keep_last", keep)
    await volume.setxattr(ROOT, b"user.retainz.reap", b"1")


# What is no checkpoint


async def test_a_program_that_rotates_its_own_files_keeps_them(
    clock: Clock, mount: Options
) -> None:
    """A cache of ten pieces below a directory with keep_last=2: its deletions show that it is a
    stream, and nobody asked for less of it."""
    async with mounted(await formatted(small_device(zones=200)), mount) as volume:
        await reaping(volume, b"2")
        cache = await directory(volume, b"cache")
        live: list[bytes] = []
        for number in range(20):
            clock.time_s += 50
            live.append(b"batch%d.dat" % number)
            await put(volume, cache, live[-1], LARGE)
            if len(live) > 10:
                await volume.unlink(cache, live.pop(0))
            await settled(volume)
            assert names(volume, cache) == set(live)
        assert states(volume, cache), "its deletions have not shown that it is a stream"


async def test_stages_with_checkpoints_in_them_are_not_reaped(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await reaping(volume)
        for number in range(1, 5):
            stage = await directory(volume, b"step_%d" % number)
            await put(volume, stage, b"config.json", b"{}")
            for step in (100, 200):
                await checkpoint(volume, stage, step)
            await settled(volume)
        assert names(volume) == {b"step_%d" % number for number in range(1, 5)}


async def test_deepspeed_in_a_checkpoint_is_no_stage(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await reaping(volume)
        for number in (1, 2):
            top = await directory(volume, b"checkpoint-%d" % number)
            inner = await directory(volume, b"global_step%d" % number, top)
            await put(volume, inner, b"mp_rank_00_model_states.pt", archive())
            await put(volume, top, b"trainer_state.json", b"{}")
            await settled(volume)
        assert names(volume) == {b"checkpoint-2"}


async def test_numbered_experiments_are_not_presumed_to_be_checkpoints(mount: Options) -> None:
    """`keep_last` at the top makes bare numbers generations; that nobody writes any more in one is
    not enough to delete it."""
    async with mounted(await formatted(small_device()), mount) as volume:
        await reaping(volume)
        for number in range(5):
            experiment = await directory(volume, b"%d" % number)
            await put(volume, experiment, b"log.txt", b"{}")
            await put(volume, experiment, b"model.pt", archive())
            await settled(volume)
        assert names(volume) == {b"%d" % number for number in range(5)}
        experiment = volume.lookup(ROOT, b"3").ino
        for number in (3, 4):
            top = volume.lookup(ROOT, b"%d" % number).ino
            await volume.setxattr(top, b"user.retainz.commit", b"1")
        await settled(volume)
        assert b"3" not in names(volume), "what is said to be complete is a checkpoint"


async def test_a_numbered_experiment_has_streams_of_its_own(mount: Options) -> None:
    """Also after a remount, and for whoever sets attributes at its checkpoints."""
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        await reaping(volume, b"2")
        experiment = await directory(volume, b"7")
        await put(volume, experiment, b"config.json", b"{}")
        await checkpoint(volume, experiment, 1)
        top = await directory(volume, b"checkpoint-2", experiment)
        await put(volume, top, b"shard", b"x" * 5000)
        await volume.setxattr(top, b"user.retainz.commit", b"1")
        assert states(volume, experiment) == {1: "complete", 2: "complete"}
        assert volume.explain(top)["generation"] == 2
    async with mounted(device, mount) as volume:
        experiment = volume.lookup(ROOT, b"7").ino
        await checkpoint(volume, experiment, 3)
        await settled(volume)
        assert names(volume, experiment) == {b"config.json", b"checkpoint-2", b"checkpoint-3"}


# What is kept on purpose


@pytest.mark.parametrize("at", [b"shard-000.bin", b"part"])
async def test_an_anchor_inside_a_generation_keeps_it(at: bytes, mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await reaping(volume)
        top = await checkpoint(volume, ROOT, 1)
        await put(volume, await directory(volume, b"part", top), b"rank0", b"x" * 5000)
        inside = volume.lookup(top, at).ino
        await volume.setxattr(inside, b"user.retainz.anchor", b"1")
        assert volume.explain(inside)["anchor"]
        for number in (2, 3):
            await checkpoint(volume, ROOT, number)
            await settled(volume)
        assert names(volume) == {b"checkpoint-1", b"checkpoint-3"}


@pytest.mark.parametrize(
    ("link", "target"),
    [
        (b"/mnt/v/run", b"../current/checkpoint-1"),
        (b"/mnt/v", b"../current/run/checkpoint-1"),
        (b"/mnt//v/run/", b"/mnt/v/current//checkpoint-1/."),
    ],
)
async def test_a_link_over_an_absolute_link_protects(
    link: bytes, target: bytes, mount: Options
) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await reaping(volume)
        run = await directory(volume, b"run")
        await checkpoint(volume, run, 1)
        await volume.make(ROOT, b"current", LINK, 0, 0, target=link)
        await volume.make(ROOT, b"loop", LINK, 0, 0, target=b"/loop" * 30)
        await volume.make(run, b"best", LINK, 0, 0, target=target)
        for number in (2, 3):
            await checkpoint(volume, run, number)
            await settled(volume)
        assert names(volume, run) == {b"best", b"checkpoint-1", b"checkpoint-3"}


# What is not complete


async def test_jobs_that_save_the_same_steps_in_one_directory(mount: Options) -> None:
    """The marker of one says nothing of the other's directory."""
    async with mounted(await formatted(small_device()), mount) as volume:
        await reaping(volume)
        for number in (1, 2):
            a = await directory(volume, b"a-step=%d" % number)
            b = await directory(volume, b"b-step=%d" % number)
            await put(volume, a, b"shard", b"x" * 1000)
            await put(volume, b, b"shard", b"x" * 500)
            if number == 1:
                await put(volume, b, b"metadata.json", b"{}")
            await put(volume, a, b"metadata.json", b"{}")
            await settled(volume)
        assert names(volume) == {b"b-step=1", b"a-step=2", b"b-step=2"}


@pytest.mark.parametrize("temporary", [b"step-2.pt.tmp", b"mkstemp_abc"])
async def test_a_broken_file_is_not_completed_by_its_final_name(
    temporary: bytes, mount: Options
) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await reaping(volume)
        await put(volume, ROOT, b"step-1.pt", archive())
        await put(volume, ROOT, temporary, archive()[:-10])
        await volume.rename(ROOT, temporary, ROOT, b"step-2.pt")
        await settled(volume)
        assert states(volume) == {1: "complete", 2: "incomplete"}
        await volume.unlink(ROOT, b"step-2.pt")
        await put(volume, ROOT, temporary, archive())
        await volume.rename(ROOT, temporary, ROOT, b"step-2.pt")
        await settled(volume)
        assert names(volume) == {b"step-2.pt"}


async def test_a_broken_file_is_not_completed_by_a_link(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await reaping(volume)
        await put(volume, ROOT, b"step-1.pt", archive())
        file = await put(volume, ROOT, b"mkstemp_abc", archive()[:-10])
        await volume.link(file, ROOT, b"step-2.pt")
        await settled(volume)
        assert states(volume) == {1: "complete", 2: "incomplete"}


async def test_what_a_killed_process_left_is_not_completed_by_a_rename(mount: Options) -> None:
    """Under a name that says nothing, in a format that does not show its end."""
    async with mounted(await formatted(small_device()), mount) as volume:
        await reaping(volume)
        await put(volume, ROOT, b"step-1.bin", b"x" * 9000)
        file = await opened(volume, ROOT, b"scratch", b"x" * 5000)
        await closed(volume, file, died=True)
        await volume.rename(ROOT, b"scratch", ROOT, b"step-2.bin")
        await settled(volume)
        assert states(volume) == {1: "complete", 2: "incomplete"}


async def test_a_save_that_lacks_a_file_is_not_presumed_complete(mount: Options) -> None:
    """Accelerate has no marker; a save that an exception ended has all but its last small file."""
    async with mounted(await formatted(small_device()), mount) as volume:
        await reaping(volume)
        top = await directory(volume, b"checkpoints")
        for number in range(1, 10):
            step = await directory(volume, b"checkpoint_%d" % number, top)
            await put(volume, step, b"optimizer.bin", b"x" * 20000)
            await settled(volume)
            if number == 4:
                assert b"checkpoint_2" in names(volume, top), "the last good one is gone"
            if number in (1, 2, 5):
                await put(volume, step, b"random_states_0.pkl", b"x" * 500)
                await settled(volume)
        left = {b"checkpoint_%d" % number for number in (3, 4, 6, 7, 8, 9)}
        assert names(volume, top) == left, "from 6 on saves have a file less"


async def test_torn_saves_of_many_jobs_cost_nothing_after_a_remount(
    clock: Clock, mount: Options
) -> None:
    """Not all that their streams have taught is stored, but that they have markers shows."""
    jobs = 60
    device = await formatted(small_device(zones=100))

    async def save(volume: Volume, number: int, *, torn: bool) -> None:
        for job in range(jobs):
            clock.time_s += 1
            name = b"job%s-step=%d" % (
                b"abcdefghij"[job // 6 : job // 6 + 1] * (job % 6 + 1),
                number,
            )
            step = await directory(volume, name)
            await put(volume, step, b"shard", b"x" * 1000)
            if not torn:
                await put(volume, step, b"metadata.json", b"{}")
            await settled(volume)

    async with mounted(device, mount) as volume:
        await reaping(volume)
        for number in (1, 2):
            await save(volume, number, torn=False)
        whole = names(volume)
        assert len(whole) == jobs
    async with mounted(device, mount) as volume:
        for number in (3, 4, 5):
            await save(volume, number, torn=True)
        assert names(volume) >= whole


# What may not grow


async def test_names_that_are_never_the_same_cost_no_memory(mount: Options) -> None:
    """Each of these is a series, and a stream, of its own."""
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"1")
        for number in range(200):
            form = b"model-loss0.%d-%%d.pt" % (number * 7919)
            await put(volume, run, form % number, archive(100))
            await volume.unlink(run, form % number)
        assert len(volume.retention.streams[run]) < 100
        assert len(volume.retention.series[run]) < 100


@pytest.mark.parametrize("linked", [False, True])
async def test_a_torn_file_that_comes_into_a_complete_generation(
    linked: bool, mount: Options
) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        step = await checkpoint(volume, ROOT, 1)
        file = await opened(volume, ROOT, b"scratch", b"x" * 5000)
        await closed(volume, file, died=True)
        if linked:
            await volume.link(file, step, b"more")
        else:
            await volume.rename(ROOT, b"scratch", step, b"shard-000.bin")
        assert states(volume) == {1: "incomplete"}


async def test_a_move_that_a_crash_cut_short_leaves_nothing_that_counts(mount: Options) -> None:
    """The name is moved as one operation, and which generation each file is in follows."""
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        step = await directory(volume, b"step-5")
        await put(volume, step, b"shard", b"x" * 9000)
        await put(volume, step, b".metadata", b"m" * 300)
        assert states(volume) == {5: "complete"}
        volume._regroup = lambda *_: None  # type: ignore[method-assign]
        await volume.rename(ROOT, b"step-5", ROOT, b"step-7")
    async with mounted(device, mount) as volume:
        (row,) = volume.generations(ROOT)
        assert (row["path"], row["state"]) == ("/step-7", "incomplete")
        assert row["reason"] == "its files were being moved when the mount ended"
