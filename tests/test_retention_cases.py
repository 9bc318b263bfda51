"""Retention where it is hard: reaping and crashes, links, reused names, several jobs, odd names."""

from __future__ import annotations

import contextlib
import errno
import json
import random
from collections.abc import AsyncIterator

import pytest
import trio.testing

from retainzfs import fsck
from retainzfs.volume import ROOT, FSError, Options, Volume
from tests.helpers import (
    FILE,
    Clock,
    content,
    formatted,
    mounted,
    options,
    put,
    small_device,
    tree,
    zones_of,
)
from tests.quiescence import check_quiescent
from tests.test_retention import archive, closed, directory, opened, row, states
from tests.witness import WatchedDevice

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(5)]


@pytest.fixture
def mount() -> Options:
    return options(Clock())


async def settled(volume: Volume) -> None:
    """Return when whatever follows from a save has happened, reaping included."""
    for _ in range(3):
        await volume.syncfs()
        await trio.testing.wait_all_tasks_blocked()


def names(volume: Volume, ino: int = ROOT) -> set[bytes]:
    return {name for name, _ in volume.entries(ino)}


async def checkpoint(volume: Volume, parent: int, number: int, shards: int = 2) -> int:
    """Save as the Hugging Face trainer does, the marker last; return the directory."""
    step = await directory(volume, b"checkpoint-%d" % number, parent)
    for shard in range(shards):
        await put(volume, step, b"shard-%03d.bin" % shard, b"%d." % number * 2000)
    await put(volume, step, b"trainer_state.json", b"{}")
    return step


# Reaping is atomic


async def survivors(device: WatchedDevice, start: int) -> AsyncIterator[WatchedDevice]:
    """Yield the device as it comes back when the power is cut at each moment from `start` on."""
    medium = device.fresh_medium()
    for at, operation in enumerate(device.history, 1):
        medium.take(operation)
        if at >= start:
            survivor = device.revived(medium, random.Random(at))
            await survivor.start()
            yield survivor


async def large(volume: Volume) -> dict[bytes, bytes | None]:
    """Save a generation of more names than one batch takes; return its tree."""
    step = await directory(volume, b"checkpoint-1")
    for part in range(4):
        deeper = await directory(volume, b"part-%d" % part, step)
        for shard in range(80):
            await volume.make(deeper, b"%03d." % shard + b"n" * 200, FILE, 0, 0)
    await put(volume, step, b"model.bin", b"x" * 90_000)
    await put(volume, step, b"trainer_state.json", b"{}")
    return await tree(volume, step)


async def test_a_crash_shows_a_reaped_tree_whole_or_not_at_all() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        whole = await large(volume)
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
        await volume.syncfs()
        start = device.operations
        await checkpoint(volume, ROOT, 2)
        await settled(volume)
        assert names(volume) == {b"checkpoint-2"}
    seen = {True: 0, False: 0}
    left = 0
    async for survivor in survivors(device, start):
        async with mounted(survivor) as volume:
            there = b"checkpoint-1" in names(volume)
            seen[there] += 1
            left += volume.namespace.limbo is not None
            if there:
                step = volume.lookup(ROOT, b"checkpoint-1").ino
                assert await tree(volume, step) == whole
                assert states(volume)[1] in ("complete", "retired")
            else:
                assert set(states(volume)) <= {2}
            await volume.clear()
            if not there:
                assert len(volume.namespace.inodes) == 1 + len(await tree(volume)), "a leak"
                assert len(volume.namespace.generations) == len(states(volume))
            await check_quiescent(volume)
        report = await fsck.examine(survivor, scrub=True)
        assert not report.findings
    assert seen[True]
    assert seen[False]
    assert left, "no crash came while the tree was being freed"


async def test_nobody_meets_what_is_being_freed() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        step = await checkpoint(volume, ROOT, 1)
        inner = await directory(volume, b"inner", step)
        ino = await put(volume, inner, b"shard", b"x" * 9000)
        volume.open(inner)
        volume.open(ino)
        links = volume.inode(ROOT).nlink
        volume.remove_trees([(ROOT, b"checkpoint-1")])
        assert volume.inode(ROOT).nlink == links, "one less, and limbo"
        assert names(volume) == names(volume, step) == names(volume, inner) == set()
        for act in (
            lambda: volume.unlink(inner, b"shard"),
            lambda: volume.rename(inner, b"shard", ROOT, b"mine"),
            lambda: volume.make(inner, b"more", FILE, 0, 0),
            lambda: volume.link(ino, inner, b"more"),
        ):
            with pytest.raises(FSError) as refused:
                await act()
            assert refused.value.errno == errno.ENOENT
        assert await content(volume, ino) == b"x" * 9000
        await volume.write(ino, 0, b"y")
        await volume.flush(ino)
        await volume.clear()
        assert volume.namespace.limbo is None
        assert (await content(volume, ino))[:2] == b"yx", "an open file keeps its bytes"
        assert volume.inode(ROOT).nlink == 2
        volume.close(ino)
        volume.close(inner)
        assert volume.namespace.inodes.keys() == {ROOT}
        await check_quiescent(volume)


async def test_all_files_of_a_generation_go_at_once() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
        gone: list[set[bytes]] = []

        async def told(parent: int, name: bytes) -> None:
            gone.append(names(volume))
            await trio.lowlevel.checkpoint()

        volume.reaped = told  # type: ignore[method-assign]
        for number in (1, 2):
            await put(volume, ROOT, b"model-%d.pt" % number, archive(90_000))
            await put(volume, ROOT, b"optimizer-%d.pt" % number, archive(90_000))
            await settled(volume)
        assert gone == [{b"model-2.pt", b"optimizer-2.pt"}] * 2
        freed = volume.reclaim.resets
        await put(volume, ROOT, b"model-3.pt", archive(90_000))
        await put(volume, ROOT, b"optimizer-3.pt", archive(90_000))
        await settled(volume)
        assert volume.reclaim.resets > freed, "its zones are reset"
        assert names(volume) == {b"model-3.pt", b"optimizer-3.pt"}


async def test_the_newest_is_deleted_before_it_could_retire_another() -> None:
    async with mounted(await formatted(small_device())) as volume:
        await kept_one(volume)
        await checkpoint(volume, ROOT, 1)
        await checkpoint(volume, ROOT, 2)
        newest = volume.retention.known(ROOT, b"checkpoint-2")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volume._reap, newest)
            nursery.start_soon(remove, volume, ROOT, b"checkpoint-2")
        await settled(volume)
        assert set(states(volume)) <= {1}


# What something points at


async def link(volume: Volume, parent: int, name: bytes, target: bytes) -> None:
    await volume.make(parent, name, 0o120777, 0, 0, target=target)


async def kept_one(volume: Volume, parent: int = ROOT) -> None:
    await volume.setxattr(parent, b"user.retainz.keep_last", b"1")
    await volume.setxattr(parent, b"user.retainz.reap", b"1")


@pytest.mark.parametrize(
    ("above", "target"),
    [
        (False, b"checkpoint-1"),
        (False, b"./checkpoint-1/"),
        (False, b"checkpoint-1/shard-001.bin"),
        (False, b"../run/checkpoint-1"),
        (False, b"also"),
        (False, b"/mnt/ckpt/run/checkpoint-1"),
        (True, b"run/checkpoint-1/trainer_state.json"),
    ],
)
async def test_a_link_protects_its_target(above: bool, target: bytes) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run")
        await kept_one(volume, run)
        await link(volume, ROOT if above else run, b"best", target)
        if target == b"also":
            await link(volume, run, b"also", b"checkpoint-1")
        for number in (1, 2, 3):
            step = await checkpoint(volume, run, number)
            await settled(volume)
        assert set(states(volume)) == {1, 3}
        assert row(volume, 1)["state"] == "complete"
        assert row(volume, 1)["origin"].endswith("; kept: best points to it")
        kept = volume.lookup(run, b"checkpoint-1").ino
        assert volume.explain(kept)["origin"].endswith("; kept: best points to it")
        assert "kept" not in volume.explain(step)["origin"]
    async with mounted(device) as volume:
        await volume.unlink(ROOT if above else run, b"best")
        if target == b"also":
            await volume.unlink(run, b"also")
        await checkpoint(volume, run, 4)
        await settled(volume)
        assert set(states(volume)) == {4}, "nothing points to it any more"


@pytest.mark.parametrize(
    "target",
    [
        b"last",
        b"other",
        b"nothing",
        b"nothing/checkpoint-1",
        b"checkpoint-1/missing",
        b"checkpoint-1/trainer_state.json/x",
        b"..",
        b"../../../etc/passwd",
        b"/",
        b"//",
        b"/mnt/elsewhere/checkpoint-1",
        b".",
        b"x" * 4095,
    ],
)
async def test_a_link_to_nothing_of_the_stream_does_no_harm(target: bytes) -> None:
    async with mounted(await formatted(small_device())) as volume:
        run = await directory(volume, b"run")
        await kept_one(volume, run)
        await link(volume, run, b"last", target)
        await link(volume, run, b"other", b"last")
        for number in (1, 2):
            await checkpoint(volume, run, number)
            await settled(volume)
        assert set(states(volume)) == {2}
        assert names(volume, run) == {b"last", b"other", b"checkpoint-2"}


async def test_a_link_to_a_file_protects_all_files_of_its_generation() -> None:
    async with mounted(await formatted(small_device())) as volume:
        await kept_one(volume)
        await link(volume, ROOT, b"best.ckpt", b"epoch=1-step=10.ckpt")
        for number in (10, 20, 30):
            await put(volume, ROOT, b"epoch=1-step=%d.ckpt" % number, archive())
            await settled(volume)
        assert set(states(volume)) == {10, 30}


def trainer_state(best: str | None) -> bytes:
    told: dict[str, object] = {"epoch": 1.0, "best_metric": 0.5, "best_model_checkpoint": best}
    told |= {"best_global_step": 1, "log_history": [{"loss": 1 / n} for n in range(1, 500)]}
    return json.dumps(told, indent=2, sort_keys=True).encode()


async def test_the_best_of_a_trainer_is_protected() -> None:
    device = await formatted(small_device())

    async def save(volume: Volume, run: int, number: int, best: str | None) -> None:
        step = await directory(volume, b"checkpoint-%d" % number, run)
        await put(volume, step, b"model.bin", b"x" * 9000)
        await put(volume, step, b"trainer_state.json", trainer_state(best))
        await settled(volume)

    async with mounted(device) as volume:
        run = await directory(volume, b"r\xc3\xbcn")
        await kept_one(volume, run)
        await save(volume, run, 1, "/data/r\u00fcn/checkpoint-1")
        await save(volume, run, 2, "r\u00fcn/checkpoint-1")
        await save(volume, run, 3, "./r\u00fcn/checkpoint-1/")
        assert set(states(volume)) == {1, 3}
        assert row(volume, 1)["origin"].endswith("; kept: best_model_checkpoint of the newest")
    async with mounted(device) as volume:
        await save(volume, run, 4, "/elsewhere/checkpoint-3")
        assert set(states(volume)) == {3, 4}, "the first one is the best no longer"
        await save(volume, run, 5, None)
        assert set(states(volume)) == {5}


async def test_an_anchor_is_protected() -> None:
    async with mounted(await formatted(small_device())) as volume:
        await kept_one(volume)
        step = await checkpoint(volume, ROOT, 1)
        await volume.setxattr(step, b"user.retainz.anchor", b"1")
        for number in (2, 3):
            await checkpoint(volume, ROOT, number)
            await settled(volume)
        assert set(states(volume)) == {1, 3}
        await volume.removexattr(step, b"user.retainz.anchor")
        await checkpoint(volume, ROOT, 4)
        await settled(volume)
        assert set(states(volume)) == {4}


# Sizes that are announced before the bytes


async def fallocate(volume: Volume, ino: int, offset: int, length: int) -> None:
    """As glibc does where the filesystem cannot: a zero byte into each block."""
    at = offset + (length - 1) % 4096
    while at < offset + length:
        if at >= volume.inode(ino).size or (await volume.read(ino, at, 1))[0] == 0:
            await volume.write(ino, at, b"\0")
        at += 4096


@pytest.mark.parametrize("before", [0, 100, 5000, 4096 * 3])
async def test_allocating_stores_nothing_and_announces_the_size(before: int) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"3")
        ino = await opened(volume, run, b"step-1.bin", b"x" * before)
        await volume.fsync(ino)
        stored = volume.stream.written
        mtime_ns = volume.inode(ino).mtime_ns
        await fallocate(volume, ino, 0, 100_000)
        inode = volume.inode(ino)
        assert (inode.size, inode.blocks) == (100_000, -(-before // 4096))
        assert inode.mtime_ns > mtime_ns
        assert volume.retention.hint_of(inode.generation).size == 100_000
        await volume.fsync(ino)
        assert volume.stream.written <= stored + 4096, "inline bytes may move to a block"
        assert await content(volume, ino) == b"x" * before + bytes(100_000 - before)
        await volume.write(ino, 0, b"y" * 100_000)
        await volume.fsync(ino)
        assert inode.blocks == 25
        await volume.write(ino, 5000, b"\0")
        await volume.write(ino, 96_000, bytes(4000))
        await closed(volume, ino)
        expected = b"y" * 5000 + b"\0" + b"y" * 90_999 + bytes(4000)
        assert await content(volume, ino) == expected
    async with mounted(device) as volume:
        assert await content(volume, ino) == expected
    assert not (await fsck.examine(device, scrub=True)).findings


async def test_zeros_that_are_data_are_stored() -> None:
    async with mounted(await formatted(small_device())) as volume:
        ino = await put(volume, ROOT, b"zeros", bytes(9000))
        assert volume.inode(ino).blocks == 2, "what does not fill its block leaves a hole"
        ino = await put(volume, ROOT, b"tail", b"")
        await volume.write(ino, 0, b"x" * 4096)
        await volume.write(ino, 4096, b"\0x")
        assert await content(volume, ino) == b"x" * 4096 + b"\0x"
        await volume.setattr(ino, size=4097)
        await volume.setattr(ino, size=9000)
        await volume.write(ino, 4100, b"\0")
        assert await content(volume, ino) == b"x" * 4096 + bytes(9000 - 4096)


# Numbers


async def listed(volume: Volume, ino: int) -> list[int]:
    return [told["number"] for told in volume.generations(ino)]


async def test_numbers_are_listed_as_numbers() -> None:
    async with mounted(await formatted(small_device())) as volume:
        run = await directory(volume, b"run")
        for name in (b"step-100", b"step-00099", b"step-9900", b"step-10000", b"step-9"):
            step = await directory(volume, name, run)
            await put(volume, step, b".metadata", b"m" * 100)
        assert await listed(volume, run) == [9, 99, 100, 9900, 10000]
        same = await directory(volume, b"step-0100", run)
        await put(volume, same, b".metadata", b"m" * 100)
        assert await listed(volume, run) == [9, 99, 100, 9900, 10000]
        files = await directory(volume, b"files")
        for name in (b"step-10.pt", b"step-000101.pt", b"step-9.pt", b"step-99.pt"):
            await put(volume, files, name, archive())
        assert await listed(volume, files) == [9, 10, 99, 101]


@pytest.mark.parametrize("as_directory", [True, False])
async def test_a_new_run_with_lower_numbers_takes_the_place_of_the_old(as_directory: bool) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"3", reap=b"1")

        async def save(volume: Volume, number: int) -> None:
            if as_directory:
                await checkpoint(volume, run, number)
            else:
                await put(volume, run, b"step-%d.pt" % number, archive())
            await settled(volume)

        for number in (9800, 9900, 10000):
            await save(volume, number)
        assert await listed(volume, run) == [9800, 9900, 10000]
    async with mounted(device) as volume:
        await save(volume, 100)
        assert await listed(volume, run) == [100, 9900, 10000]
        await save(volume, 200)
        await save(volume, 300)
        assert await listed(volume, run) == [100, 200, 300]


async def test_a_rollback_and_saves_of_a_step_again() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"2", reap=b"1")
        for number in (10, 20, 30):
            await checkpoint(volume, run, number)
            await settled(volume)
        assert await listed(volume, run) == [20, 30]
        # Set back to 20: saved again into its directory, the marker too.
        step = volume.lookup(run, b"checkpoint-20").ino
        for name in (b"shard-000.bin", b"trainer_state.json"):
            ino = volume.lookup(step, name).ino
            volume.open(ino)
            await volume.setattr(ino, size=0)
            await volume.write(ino, 0, b"again" * 1000)
            await closed(volume, ino)
        await settled(volume)
        assert states(volume) == {20: "complete", 30: "complete"}, "one number counts once"
        # And once more, into a new directory of the name.
        await remove(volume, run, b"checkpoint-20")
        assert await listed(volume, run) == [30]
        await checkpoint(volume, run, 20)
        await settled(volume)
        assert states(volume) == {20: "complete", 30: "complete"}
        await checkpoint(volume, run, 25)
        await settled(volume)
        assert await listed(volume, run) == [20, 25], "20 is younger than 30"
    async with mounted(device) as volume:
        assert states(volume) == {20: "complete", 25: "complete"}


async def remove(volume: Volume, parent: int, name: bytes, most: int = 1 << 30) -> int:
    """Delete a tree as `rm -r` does, at most so many names of it; return how many were left."""
    ino = volume.lookup(parent, name).ino
    if volume.inode(ino).is_dir:
        for below, _ in volume.entries(ino):
            most = await remove(volume, ino, below, most)
    if most:
        await (volume.rmdir if volume.inode(ino).is_dir else volume.unlink)(parent, name)
    return max(0, most - 1)


@pytest.mark.parametrize("deleted", [1, 2, 3])
async def test_a_deletion_that_is_cut_short_leaves_nothing_complete(deleted: int) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"1", reap=b"1")
        step = await directory(volume, b"checkpoint-1", run)
        await put(volume, step, b"a.bin", b"x" * 9000)
        await put(volume, step, b"zz.bin", b"x" * 9000)
        await put(volume, step, b"trainer_state.json", b"{}")
        assert states(volume) == {1: "complete"}
        await remove(volume, run, b"checkpoint-1", deleted)
        assert set(states(volume).values()) <= {"incomplete"}
        await volume.syncfs()
        cut = device.after_cut(random.Random(deleted))
    await cut.start()
    async with mounted(cut) as volume:
        assert set(states(volume).values()) <= {"incomplete"}
        await volume.setxattr(run, b"user.retainz.keep_last", b"2")
        for number in (2, 3):
            await checkpoint(volume, run, number)
            await settled(volume)
        assert set(states(volume)) >= {2, 3}, "what is left does not count"


async def test_what_a_crash_left_never_counts() -> None:
    async with mounted(await formatted(small_device())) as volume:
        run = await directory(volume, b"run", keep_last=b"2", reap=b"1")
        await checkpoint(volume, run, 1)
        for number in (2, 3):
            left = await directory(volume, b"checkpoint-%d" % number, run)
            await put(volume, left, b"model.bin", b"x" * 9000)
        await checkpoint(volume, run, 4)
        await settled(volume)
        assert states(volume) == {
            1: "complete", 2: "incomplete", 3: "incomplete", 4: "complete",
        }  # fmt: skip
        await checkpoint(volume, run, 5)
        await settled(volume)
        assert set(states(volume)) == {2, 3, 4, 5}


async def test_stray_names_count_as_nothing() -> None:
    async with mounted(await formatted(small_device())) as volume:
        run = await directory(volume, b"run", keep_last=b"1", reap=b"1")
        await checkpoint(volume, run, 1)
        temporary = await directory(volume, b"2.orbax-checkpoint-tmp", run)
        await put(volume, temporary, b"array", b"x" * 9000)
        for name in (b"step-3.bak", b"step-4.pt.bak", b"step-5.txt", b"notes", b"model-6.pt.tmp"):
            await put(volume, run, name, archive())
        await settled(volume)
        whole = {n for n, state in states(volume).items() if state == "complete"}
        assert whole == {1}
        assert len(names(volume, run)) == 7
        await volume.rename(run, b"model-6.pt.tmp", run, b"model-6.pt")
        await settled(volume)
        assert b"checkpoint-1" in names(volume, run), "model-6.pt is of another series"


@pytest.mark.parametrize(
    "told", [b"", b"release", b"\0" * 7, b"12", b"-1", b"99999999999999999999"]
)
async def test_a_tracker_that_names_no_generation(told: bytes) -> None:
    async with mounted(await formatted(small_device())) as volume:
        run = await directory(volume, b"run", keep_last=b"1", reap=b"1")
        for number in (10, 11):
            step = await directory(volume, b"iter_%07d" % number, run)
            await put(volume, step, b"model.pt", archive())
        released = await directory(volume, b"release", run)
        await put(volume, released, b"model.pt", archive())
        tracker = await put(volume, run, b"latest_checkpointed_iteration.txt", b"10")
        assert states(volume) == {10: "complete", 11: "writing"}
        volume.open(tracker)
        await volume.setattr(tracker, size=0)
        await volume.write(tracker, 0, told)
        await closed(volume, tracker)
        await settled(volume)
        assert states(volume) == {10: "complete", 11: "writing"}


@pytest.mark.parametrize(
    "name",
    [
        b"my model-7.pt",
        b"a = b_step=7.ckpt",
        "größe-模型-🔥_7.pt".encode(),
        b"\xff\xfe-7.pt",
        b"line\nbreak-7.pt",
        b"n" * 250 + b"-7.pt",
    ],
)
async def test_odd_names(name: bytes) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"r = \xc3\xbc " + b"d" * 240, keep_last=b"1", reap=b"1")
        await put(volume, run, name.replace(b"7", b"6"), archive())
        await put(volume, run, name, archive())
        await settled(volume)
        assert states(volume) == {7: "complete"}
        assert names(volume, run) == {name}
        assert json.loads(volume.getxattr(ROOT, b"user.retainz.generations"))[0]["number"] == 7
    async with mounted(device) as volume:
        assert states(volume) == {7: "complete"}


async def test_a_stream_moves_while_it_is_written() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"1", reap=b"1")
        await checkpoint(volume, run, 1)
        step = await directory(volume, b"checkpoint-2", run)
        ino = await opened(volume, step, b"model.bin", b"x" * 9000)
        elsewhere = await directory(volume, b"elsewhere")
        await volume.rename(ROOT, b"run", elsewhere, b"moved")
        await volume.write(ino, 9000, b"y" * 9000)
        await closed(volume, ino)
        await put(volume, step, b"trainer_state.json", b"{}")
        await settled(volume)
        assert [r["path"] for r in volume.generations(ROOT)] == ["/elsewhere/moved/checkpoint-2"]
        assert states(volume) == {2: "complete"}
    async with mounted(device) as volume:
        await checkpoint(volume, run, 3)
        await settled(volume)
        assert states(volume) == {3: "complete"}


@pytest.mark.parametrize("as_directory", [True, False])
async def test_what_nemo_calls_unfinished_does_not_count(as_directory: bool) -> None:
    """It lays the file beside before it saves, and before it deletes."""
    device = await formatted(small_device())

    async def save(volume: Volume, run: int, number: int) -> bytes:
        stem = b"gpt--loss=0.5-step=%d" % number
        name = stem if as_directory else stem + b".ckpt"
        await put(volume, run, stem + b"-unfinished", b"")
        if as_directory:
            step = await directory(volume, name, run)
            await put(volume, step, b"model.bin", b"x" * 9000)
            await put(volume, step, b"metadata.json", b"{}")
        else:
            await put(volume, run, name, archive())
        return name

    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"1", reap=b"1")
        first = await save(volume, run, 1)
        assert states(volume) == {1: "writing"}
        await volume.unlink(run, b"gpt--loss=0.5-step=1-unfinished")
        assert states(volume) == {1: "complete"}
        await save(volume, run, 2)
        await settled(volume)
        assert states(volume) == {1: "complete", 2: "writing"}
        await volume.unlink(run, b"gpt--loss=0.5-step=2-unfinished")
        await settled(volume)
        assert states(volume) == {2: "complete"}
        second = await save(volume, run, 3)
        assert first != second
        await volume.syncfs()
        cut = device.after_cut(random.Random(1))
    await cut.start()
    async with mounted(cut) as volume:
        assert states(volume) == {2: "complete", 3: "incomplete"}, "it crashed within the save"
        await put(volume, run, b"gpt--loss=0.5-step=2-unfinished", b"")
        assert states(volume) == {2: "incomplete", 3: "incomplete"}, "it is being deleted"
        assert row(volume, 2)["reason"] == "it is called unfinished"


# Several files, several jobs


@pytest.mark.parametrize("apart", [0, 5])
async def test_two_jobs_in_a_directory_do_not_eat_each_others_generations(apart: int) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"2", reap=b"1")
        await put(volume, run, b"model-b-7.pt", archive())
        for number in (10, 20, 30, 40):
            await put(volume, run, b"model-a-%d.pt" % number, archive())
            await settled(volume)
        assert names(volume, run) == {b"model-b-7.pt", b"model-a-30.pt", b"model-a-40.pt"}
    async with mounted(device) as volume:
        for number in (50, 60):
            await put(volume, run, b"model-b-%d.pt" % (number + apart), archive())
            await put(volume, run, b"model-a-%d.pt" % number, archive())
            await settled(volume)
        assert names(volume, run) == {
            b"model-a-50.pt", b"model-a-60.pt",
            b"model-b-%d.pt" % (50 + apart), b"model-b-%d.pt" % (60 + apart),
        }  # fmt: skip


@pytest.mark.parametrize("form", [b"step-%d-rank%d.pt", b"ep0-ba%d-rank%d.pt"])
async def test_ranks_of_a_step_count_together(form: bytes) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"1", reap=b"1")
        for rank in range(3):
            await put(volume, run, form % (5, rank), archive())
            await settled(volume)
        assert states(volume) == {5: "complete"}
        for rank in range(2):
            await put(volume, run, form % (6, rank), archive())
            await settled(volume)
        assert states(volume) == {5: "complete", 6: "writing"}, "rank 2 is not there yet"
        await put(volume, run, form % (6, 2), archive())
        await settled(volume)
        assert names(volume, run) == {form % (6, rank) for rank in range(3)}
    async with mounted(device) as volume:
        await put(volume, run, form % (7, 0), archive())
        await settled(volume)
        assert states(volume) == {6: "complete", 7: "writing"}


async def test_the_last_file_of_a_slow_job_is_kept() -> None:
    """It began together with the other one, so that both pass for one job with two files."""
    async with mounted(await formatted(small_device())) as volume:
        run = await directory(volume, b"run", keep_last=b"1", reap=b"1")
        for name in (b"model-a-0.pt", b"model-b-0.pt"):
            await put(volume, run, name, archive())
        for number in range(10, 100, 10):
            await put(volume, run, b"model-a-%d.pt" % number, archive())
            await settled(volume)
        assert b"model-b-0.pt" in names(volume, run)
        assert row(volume, 0)["origin"].endswith("kept: none newer has a file like model-b-0.pt")
        assert b"model-a-50.pt" not in names(volume, run)
        await put(volume, run, b"model-b-90.pt", archive())
        await settled(volume)
        assert b"model-b-0.pt" not in names(volume, run)


# Hard links between generations


def size_of(volume: Volume, number: int) -> int:
    return int(row(volume, number)["size"])


async def linked(volume: Volume, run: int) -> int:
    """Save steps 5 and 6, of which the second links an unchanged shard; return that file."""
    five = await directory(volume, b"checkpoint-5", run)
    shard = await put(volume, five, b"shard", b"s" * 90_000)
    await put(volume, five, b"own", b"5" * 9000)
    await put(volume, five, b"trainer_state.json", b"{}")
    six = await directory(volume, b"checkpoint-6", run)
    await volume.link(shard, six, b"shard")
    await put(volume, six, b"own", b"6" * 9000)
    await put(volume, six, b"trainer_state.json", b"{}")
    return shard


@pytest.mark.parametrize("remount", [False, True])
async def test_a_linked_shard_is_in_both_generations(remount: bool) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"3", cadence=b"60s")
        shard = await linked(volume, run)
        inode = volume.inode(shard)
        assert size_of(volume, 5) == size_of(volume, 6) == 99_002
        six = volume.retention.known(run, b"checkpoint-6")
        assert inode.generation == six, "its bytes retire with the later one"
        await volume.fsync(shard)
        assert {g for z in zones_of(volume, shard) for g in volume.table[z].live} >= {six}
        if not remount:
            await check_links(volume, run, shard)
    if remount:
        async with mounted(device) as volume:
            await check_links(volume, run, shard)
    async with mounted(device) as volume:
        assert states(volume) == {}
        assert not volume.namespace.generations
        assert not volume.retention.members


async def check_links(volume: Volume, run: int, shard: int) -> None:
    assert states(volume) == {5: "complete", 6: "complete"}
    assert [r["path"] for r in volume.generations(ROOT)] == [
        "/run/checkpoint-5", "/run/checkpoint-6",
    ]  # fmt: skip
    await remove(volume, run, b"checkpoint-5")
    assert states(volume) == {6: "complete"}, "5 has ended though a file of it lives on"
    assert size_of(volume, 6) == 99_002
    assert await content(volume, shard) == b"s" * 90_000
    assert volume.path(shard) == "/run/checkpoint-6/shard"
    await remove(volume, run, b"checkpoint-6")
    assert states(volume) == {}
    await settled(volume)
    assert shard not in volume.namespace.inodes, "space lives until the last name goes"


async def test_the_later_one_goes_first() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"3", cadence=b"60s")
        shard = await linked(volume, run)
        await remove(volume, run, b"checkpoint-6")
        assert states(volume) == {5: "complete"}
        assert volume.inode(shard).generation == volume.retention.known(run, b"checkpoint-5")
        await check_quiescent(volume)
    async with mounted(device) as volume:
        assert states(volume) == {5: "complete"}
        assert size_of(volume, 5) == 99_002


async def test_reaping_leaves_what_others_link() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"1", reap=b"1")
        shard = await linked(volume, run)
        await settled(volume)
        assert states(volume) == {6: "complete"}
        assert size_of(volume, 6) == 99_002
        assert await content(volume, shard) == b"s" * 90_000
        assert volume.inode(shard).nlink == 1
        await check_quiescent(volume)
    async with mounted(device) as volume:
        assert states(volume) == {6: "complete"}
        assert size_of(volume, 6) == 99_002


@pytest.mark.parametrize("remount", [False, True])
async def test_files_of_one_directory_that_are_linked(remount: bool) -> None:
    """`step-6.pt` is `step-5.pt`, or a job goes on from another one's file."""
    device = await formatted(small_device())
    async with mounted(device) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        ino = await put(volume, ROOT, b"model-a-5.pt", archive(90_000))
        await volume.link(ino, ROOT, b"model-a-6.pt")
        await volume.link(ino, ROOT, b"model-b-5.pt")
        await volume.link(ino, ROOT, b"best.pt")
        told = [(r["number"], r["state"], r["path"]) for r in volume.generations(ROOT)]
        assert told == [
            (5, "retired", "/model-a-5.pt"),
            (6, "complete", "/model-a-6.pt"),
            (5, "complete", "/model-b-5.pt"),
        ]
        if not remount:
            await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
            await put(volume, ROOT, b"model-a-7.pt", archive(90_000))
            await settled(volume)
    if remount:
        async with mounted(device) as volume:
            assert len(volume.generations(ROOT)) == 3
            await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
            await put(volume, ROOT, b"model-a-7.pt", archive(90_000))
            await settled(volume)
    async with mounted(device) as volume:
        assert names(volume) == {b"model-a-7.pt", b"model-b-5.pt", b"best.pt"}
        assert await content(volume, ino) == archive(90_000)
        assert volume.inode(ino).nlink == 2


async def test_a_link_from_a_temporary_name_completes_as_a_rename_does() -> None:
    async with mounted(await formatted(small_device())) as volume:
        ino = await put(volume, ROOT, b"model-5.pt.tmp", archive())
        assert states(volume) == {5: "writing"}
        await volume.link(ino, ROOT, b"model-5.pt")
        assert states(volume) == {5: "complete"}
        await volume.unlink(ROOT, b"model-5.pt.tmp")
        assert states(volume) == {5: "complete"}
        torn = await opened(volume, ROOT, b"model-6.pt", archive()[:-9])
        await closed(volume, torn)
        await volume.link(torn, ROOT, b"model-7.pt")
        assert states(volume) == {5: "complete", 6: "incomplete", 7: "incomplete"}


Belonging = tuple[dict[int, set[int]], dict[int, set[tuple[int, bytes]]]]


def belonging(volume: Volume) -> Belonging:
    """Return generation → files, and file → names, as the volume counts them."""
    members = {g: set(m) for g, m in volume.retention.members.items()}
    several = {
        ino: set(volume.namespace.names(volume.inode(ino)))
        for ino in volume.namespace.links
        if volume.inode(ino).nlink > 1
    }
    return members, several


def by_names(volume: Volume) -> Belonging:
    """Return the same from nothing but the names that there are."""
    members: dict[int, set[int]] = {}
    several: dict[int, set[tuple[int, bytes]]] = {}
    for directory_ in list(volume.namespace.inodes.values()):
        for name, ino in volume.entries(directory_.ino) if directory_.is_dir else ():
            if not volume.inode(ino).is_file:
                continue
            generation = volume.retention.known(directory_.ino, name)
            named = volume.retention.context(directory_.ino, name).match is not None
            assert bool(generation) == named, f"{name!r} in {directory_.ino} is in no generation"
            if generation:
                members.setdefault(generation, set()).add(ino)
            if volume.inode(ino).nlink > 1:
                several.setdefault(ino, set()).add((directory_.ino, name))
    return members, several


@pytest.mark.parametrize("seed", range(12))
async def test_members_follow_names_and_a_mount_finds_the_same(seed: int) -> None:
    rng = random.Random(seed)
    device = await formatted(small_device())
    async with mounted(device) as volume:
        run = await directory(volume, b"run", keep_last=b"2", cadence=b"60s")
        places = [run, ROOT]
        for number in range(3):
            places.append(await directory(volume, b"checkpoint-%d" % number, run))
    options_ = (b"a", b"b", b"model-7.pt", b"model-8.pt", b"model-7.pt.tmp", b"best.pt")
    for _ in range(4):
        async with mounted(device) as volume:
            for _ in range(25):
                await _any_change(volume, rng, places, options_)
                assert belonging(volume) == by_names(volume)
            before = belonging(volume)
            accounted = {i.ino: i.generation for i in volume.namespace.inodes.values()}
            await check_quiescent(volume)
        async with mounted(device) as volume:
            assert belonging(volume) == before == by_names(volume)
            assert accounted == {i.ino: i.generation for i in volume.namespace.inodes.values()}
    assert not (await fsck.examine(device, scrub=True)).findings


async def _any_change(
    volume: Volume, rng: random.Random, places: list[int], options_: tuple[bytes, ...]
) -> None:
    place = rng.choice(places), rng.choice(options_)
    other = rng.choice(places), rng.choice(options_)
    with contextlib.suppress(FSError):
        match rng.randrange(7):
            case 0 | 1:
                await put(volume, *place, archive(rng.choice((100, 9000))))
            case 2 | 3:
                await volume.link(volume.lookup(*place).ino, *other)
            case 4:
                await volume.unlink(*place)
            case 5:
                await volume.rename(*place, *other)
            case 6:
                await volume.rename(*place, *other, 2)
