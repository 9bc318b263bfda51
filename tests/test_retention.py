"""Generations: which files they hold, what completes them, when they retire."""

from __future__ import annotations

import io
import json
import random
import sys
import zipfile
from typing import Any

import pytest
import trio.testing

from retainzfs.errors import DeviceError, NoSpace
from retainzfs.journal import METADATA_ZONES_MIN
from retainzfs.volume import ROOT, FSError, Options, Volume
from retainzfs.zone import Kind
from tests.helpers import (
    DIRECTORY,
    FILE,
    Clock,
    formatted,
    mounted,
    put,
    small_device,
    tree,
    until_power_cut,
    zones_of,
)

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(5)]


def archive(length: int = 5000) -> bytes:
    """Return a whole zip archive, as torch.save writes one; always the same."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(zipfile.ZipInfo("data"), bytes(length))
    return out.getvalue()


async def directory(volume: Volume, name: bytes, parent: int = ROOT, **attributes: bytes) -> int:
    ino = (await volume.make(parent, name, DIRECTORY, 0, 0)).ino
    for key, value in attributes.items():
        name_ = "class" if key == "file_class" else key
        await volume.setxattr(ino, b"user.retainz." + name_.encode(), value)
    return ino


def states(volume: Volume, ino: int = ROOT) -> dict[int, str]:
    return {row["number"]: row["state"] for row in volume.generations(ino)}


def row(volume: Volume, number: int) -> dict[str, Any]:
    return next(r for r in volume.generations(ROOT) if r["number"] == number)


async def test_a_closed_archive_is_complete_and_a_broken_one_is_not(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await put(volume, ROOT, b"step-1.pt", archive())
        await put(volume, ROOT, b"step-2.pt", archive()[:-10])
        await volume.make(ROOT, b"step-3.pt", FILE, 0, 0)
        assert states(volume) == {1: "complete", 2: "incomplete", 3: "writing"}


async def test_a_marker_completes_a_directory(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        step = await directory(volume, b"checkpoint-5")
        await put(volume, step, b"model.bin", b"x" * 9000)
        deeper = await directory(volume, b"rank", step)
        await put(volume, deeper, b"trainer_state.json", b"not at the top")
        assert states(volume) == {5: "writing"}
        await put(volume, step, b"trainer_state.json", b"{}")
        assert states(volume) == {5: "complete"}
        assert row(volume, 5)["size"] == 9000 + len(b"not at the top") + 2


async def test_a_rename_from_a_temporary_name_completes(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        step = await directory(volume, b"tmp-checkpoint-5")
        await put(volume, step, b"trainer_state.json", b"{}")
        assert set(states(volume).values()) <= {"writing"}
        await volume.rename(ROOT, b"tmp-checkpoint-5", ROOT, b"checkpoint-5")
        assert states(volume) == {5: "complete"}
        await put(volume, ROOT, b"model-6.pt.tmp", b"no archive")
        await volume.rename(ROOT, b"model-6.pt.tmp", ROOT, b"model-6.pt")
        assert states(volume) == {5: "complete", 6: "complete"}


async def test_the_commit_attribute_completes(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        step = await directory(volume, b"iter_0000007")
        ino = await put(volume, step, b"shard", b"x" * 9000)
        await volume.setxattr(step, b"user.retainz.commit", b"1")
        assert states(volume) == {7: "complete"}
        assert volume.getxattr(ino, b"user.retainz.state") == b"complete"
        assert volume.getxattr(ino, b"user.retainz.generation") == b"7"
        assert b"user.retainz.commit" not in volume.listxattr(step), "an act is not stored"


async def test_cadence_is_learned_and_gives_retirements(clock: Clock, mount: Options) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"3")
        for number in (1, 2, 3):
            await put(volume, ROOT, b"step-%d.pt" % number, archive())
            clock.time_s += 100
        assert volume.statistics()["streams"][0]["cadence_s"] == pytest.approx(100, abs=1)
        for number in (1, 2, 3):
            told = row(volume, number)
            assert told["retire_epoch"] - told["birth_epoch"] == pytest.approx(300, abs=3)
            assert "keep_last=3, learned cadence" in told["origin"]
        clock.time_s += 300
        assert row(volume, 1)["state"] == "complete", "the newest three are kept, however old"
        await put(volume, ROOT, b"step-4.pt", archive())
        assert row(volume, 1)["state"] == "retired"
        assert row(volume, 2)["state"] == "complete"
    async with mounted(device, mount) as volume:
        assert volume.statistics()["streams"][0]["cadence_s"] == pytest.approx(100, abs=1)


async def test_stated_epochs_and_sizes_are_inherited(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", birth=b"12.5", retire=b"40", size=b"600K")
        deeper = await directory(volume, b"deeper", run)
        ino = await put(volume, deeper, b"step-1.pt", archive())
        told = row(volume, 1)
        assert (told["birth_epoch"], told["retire_epoch"]) == (12.5, 40)
        assert told["origin"] == "retire=40"
        assert volume.retention.hint_of(volume.inode(ino).generation).size == 600 << 10
        assert json.loads(volume.getxattr(ino, b"user.retainz.hint")) == {
            "a": 12.5,
            "d": 40,
            "origin": "retire=40",
        }
        await volume.setxattr(deeper, b"user.retainz.retire", b"inf")
        assert row(volume, 1)["anchor"], "the nearer attribute wins"
        assert row(volume, 1)["retire_epoch"] is None


async def test_a_size_may_be_stated_for_one_generation(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"3", size=b"600K")
        sizes = []
        for name, attributes in ((b"step-1", {"size": b"700K"}), (b"step-2", {})):
            saved = await directory(volume, name, run, **attributes)
            inside = await directory(volume, b"optimizer", saved)
            ino = await put(volume, inside, b"model.bin", b"weights")
            sizes.append(volume.retention.hint_of(volume.inode(ino).generation).size)
        assert sizes == [700 << 10, 600 << 10]


async def test_a_changed_policy_moves_what_is_there(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await volume.setxattr(ROOT, b"user.retainz.cadence", b"60s")
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        for number in (9, 10, 100):
            await put(volume, ROOT, b"step-%d.pt" % number, archive())
        before = {n: row(volume, n)["retire_epoch"] for n in (9, 10, 100)}
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"2")
        for number, retire in before.items():
            assert row(volume, number)["retire_epoch"] == pytest.approx(retire + 60, abs=0.1)
        await volume.setxattr(ROOT, b"user.retainz.keep_every", b"100")
        assert {n: row(volume, n)["anchor"] for n in before} == {9: False, 10: False, 100: True}
        await volume.removexattr(ROOT, b"user.retainz.keep_every")
        assert not row(volume, 100)["anchor"]


async def test_generations_are_listed_by_number_and_go_with_their_last_file(
    mount: Options,
) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        for number in (100, 9, 10):
            await put(volume, ROOT, b"model-%d.pt" % number, archive())
            await put(volume, ROOT, b"optimizer-%d.pt" % number, archive())
        assert [r["number"] for r in volume.generations(ROOT)] == [9, 10, 100]
        await volume.unlink(ROOT, b"model-10.pt")
        assert [r["number"] for r in volume.generations(ROOT)] == [9, 10, 100]
        await volume.unlink(ROOT, b"optimizer-10.pt")
        assert [r["number"] for r in volume.generations(ROOT)] == [9, 100]
    async with mounted(device, mount) as volume:
        assert [r["number"] for r in volume.generations(ROOT)] == [9, 100]
        assert len(volume.namespace.generations) == 2


async def test_the_newest_in_commit_order_are_kept(mount: Options) -> None:
    """A run that was set back saves lower numbers: those are the newest then."""
    async with mounted(await formatted(small_device()), mount) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"2")
        for number in (10, 20, 30, 20, 5, 6):
            name = b"step-%d.pt" % number
            if name in dict(volume.entries(ROOT)):
                await volume.unlink(ROOT, name)
            await put(volume, ROOT, name, archive())
        newest = volume.retention.known(ROOT, b"step-6.pt")
        gone = volume.retention.reapable(newest)
        numbers = {volume.namespace.generations[g].number for g in gone}
        assert numbers == set(), "nothing is deleted that nobody asked to be"
        await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
        gone = volume.retention.reapable(newest)
        assert {volume.namespace.generations[g].number for g in gone} == {10, 20, 30}


async def test_reaping_deletes_what_the_stream_keeps_no_longer(mount: Options) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        run = await directory(volume, b"run", keep_last=b"2", reap=b"1", keep_every=b"10")
        for number in (10, 11, 12, 13):
            step = await directory(volume, b"checkpoint-%d" % number, run)
            await put(volume, step, b"model.bin", b"x" * 5000)
            await put(volume, step, b"trainer_state.json", b"{}")
        await volume.syncfs()
        await volume.syncfs()
        assert sorted(name for name, _ in volume.entries(run)) == [
            b"checkpoint-10", b"checkpoint-12", b"checkpoint-13",
        ]  # fmt: skip
        assert volume.inode(run).nlink == 2 + 3
    async with mounted(device, mount) as volume:
        assert set(states(volume)) == {10, 12, 13}


async def test_trackers_are_in_no_generation(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"2")
        for name in (b"latest", b"last.ckpt", b"latest_checkpointed_iteration.txt", b"train.log"):
            ino = await put(volume, ROOT, name, b"x" * 5000)
            await volume.fsync(ino)
            assert volume.inode(ino).generation == 0
            assert {volume.table[z].kind for z in zones_of(volume, ino)} == {Kind.UNHINTED}
        assert volume.generations(ROOT) == []


async def test_names_decide_where_a_moved_file_belongs(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"2", cadence=b"60s")
        ino = await put(volume, run, b"step-1.pt", archive())
        await volume.rename(run, b"step-1.pt", ROOT, b"kept")
        assert volume.inode(ino).generation == 0
        assert volume.generations(run) == []
        await volume.rename(ROOT, b"kept", run, b"step-8.pt")
        assert set(states(volume, run)) == {8}
        await volume.fsync(ino)
        (zone,) = zones_of(volume, ino)
        assert set(volume.table[zone].live) == {volume.inode(ino).generation}


async def test_a_stream_is_renamed_while_it_is_written(mount: Options) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        run = await directory(volume, b"run", keep_last=b"2", cadence=b"60s")
        ino = (await volume.make(run, b"step-1.pt", FILE, 0, 0)).ino
        volume.open(ino)
        data = archive(40_000)
        await volume.write(ino, 0, data[:20_000])
        generation = volume.inode(ino).generation
        await volume.rename(ROOT, b"run", ROOT, b"moved")
        await volume.write(ino, 20_000, data[20_000:])
        await volume.flush(ino)
        volume.close(ino)
        assert volume.inode(ino).generation == generation
        assert [(r["number"], r["path"], r["state"]) for r in volume.generations(ROOT)] == [
            (1, "/moved/step-1.pt", "complete")
        ]
    async with mounted(device, mount) as volume:
        assert row(volume, 1)["path"] == "/moved/step-1.pt"


async def test_a_new_inode_inherits_nothing(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        old = await put(volume, ROOT, b"step-1.pt", archive())
        await volume.setxattr(old, b"user.retainz.anchor", b"1")
        await volume.unlink(ROOT, b"step-1.pt")
        new = await put(volume, ROOT, b"plain", b"x" * 5000)
        assert new != old
        assert volume.inode(new).generation == 0
        assert volume.listxattr(new) == []
        assert volume.generations(ROOT) == []


async def test_a_file_with_a_retirement_is_a_generation_by_itself(mount: Options) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        ino = await put(volume, ROOT, b"data.bin", b"")
        await volume.setxattr(ino, b"user.retainz.anchor", b"1")
        await volume.write(ino, 0, b"x" * 9000)
        await volume.fsync(ino)
        assert {volume.table[z].kind for z in zones_of(volume, ino)} == {Kind.ANCHOR}
        assert volume.generations(ROOT)[0]["path"] == "/data.bin"
        await volume.rename(ROOT, b"data.bin", ROOT, b"other.bin")
        assert volume.generations(ROOT)[0]["path"] == "/other.bin"
        await volume.unlink(ROOT, b"other.bin")
    async with mounted(device, mount) as volume:
        assert volume.generations(ROOT) == []
        assert volume.namespace.generations == {}


async def fill_up(volume: Volume, ino: int) -> None:
    for at in range(0, 1 << 30, 65536):
        await volume.write(ino, at, b"y" * 65536)


async def test_a_save_that_met_a_full_device_costs_no_older_one() -> None:
    async with mounted(await formatted(small_device(zones=24))) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
        await put(volume, ROOT, b"step-1.msgpack", b"x" * 2_450_000)
        ino = (await volume.make(ROOT, b"step-2.msgpack", FILE, 0, 0)).ino
        volume.open(ino)
        with pytest.raises(NoSpace):
            await fill_up(volume, ino)
        await volume.flush(ino)
        volume.close(ino)
        assert states(volume) == {1: "complete", 2: "incomplete"}


async def test_a_reader_that_closes_completes_nothing() -> None:
    async with mounted(await formatted(small_device())) as volume:
        ino = (await volume.make(ROOT, b"step-1.msgpack", FILE, 0, 0)).ino
        volume.open(ino)
        await volume.write(ino, 0, b"x" * 5000)
        await volume.flush(ino, wrote=False)
        assert states(volume) == {1: "writing"}
        await volume.flush(ino)
        assert states(volume) == {1: "complete"}


async def test_a_reaped_directory_that_somebody_has_open_costs_nothing_in_a_crash() -> None:
    """Its files are gone with it; no name may be left that leads to one of them."""
    device = await formatted(small_device())
    async with mounted(device) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        step = await directory(volume, b"step-1")
        inner = await directory(volume, b"shards", step)
        await put(volume, inner, b"data", b"x" * 9000)
        volume.open(step)
        volume.open(inner)
        volume.remove_trees([(ROOT, b"step-1")])
        assert volume.entries(step) == volume.entries(inner) == []
        await put(volume, ROOT, b"other", b"x")
        with pytest.raises(FSError, match="was removed"):
            await volume.rename(ROOT, b"other", inner, b"late")
        await volume.syncfs()
        cut = device.after_cut(random.Random(1))
    await cut.start()
    async with mounted(cut) as volume:
        await volume.clear()
        assert not {step, inner} & volume.namespace.inodes.keys()


async def test_a_tree_of_any_depth_is_renamed_and_removed() -> None:
    async with mounted(await formatted(small_device())) as volume:
        parent = top = await directory(volume, b"top")
        for _ in range(sys.getrecursionlimit() + 100):
            parent = (await volume.make(parent, b"deep", DIRECTORY, 0, 0)).ino
        await put(volume, parent, b"f", b"x")
        await volume.rename(ROOT, b"top", ROOT, b"moved")
        assert volume.lookup(ROOT, b"moved").ino == top
        volume.remove_trees([(ROOT, b"moved")])
        await volume.clear()
        await volume.syncfs()
        assert volume.namespace.inodes.keys() == {ROOT}


async def test_a_generation_outlives_the_directory_of_its_newest_name(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        ino = await put(volume, ROOT, b"step-1.pt", archive())
        other = await directory(volume, b"other")
        await volume.link(ino, other, b"step-1.pt")
        await volume.unlink(other, b"step-1.pt")
        await volume.rmdir(ROOT, b"other")
        volume.open(ino)
        await volume.write(ino, 0, b"P")
        await volume.flush(ino)
        volume.close(ino)
        assert volume.explain(ino)["class"] == "checkpoint"


async def test_a_close_makes_completeness_durable_even_of_bytes_that_were() -> None:
    device = await formatted(small_device())
    with until_power_cut():
        async with mounted(device) as volume:
            ino = (await volume.make(ROOT, b"step-1.bin", FILE, 0, 0)).ino
            volume.open(ino)
            await volume.write(ino, 0, b"x" * 50_000)
            await volume.fsync(ino)
            await volume.flush(ino)
            device.cut_at = device.operations + 1
            await volume.syncfs()
            await volume.make(ROOT, b"more", FILE, 0, 0)
            await volume.syncfs()
    survivor = device.after_cut(random.Random(1))
    await survivor.start()
    async with mounted(survivor) as volume:
        assert [row["state"] for row in volume.generations(ROOT)] == ["complete"]


async def test_every_file_of_a_stream_is_durable_when_it_is_closed() -> None:
    """Trackers and copies of the newest generation too: a trainer goes on when they are closed."""
    device = await formatted(small_device())
    with until_power_cut():
        async with mounted(device) as volume:
            await put(volume, ROOT, b"step-1.bin", b"x" * 50_000)
            await put(volume, ROOT, b"latest", b"step-1")
            await put(volume, ROOT, b"last.ckpt", b"y" * 50_000)
            device.cut_at = device.operations + 1
            await volume.make(ROOT, b"more", FILE, 0, 0)
            await volume.syncfs()
    survivor = device.after_cut(random.Random(1))
    await survivor.start()
    async with mounted(survivor) as volume:
        found = await tree(volume)
        assert (found[b"/latest"], found[b"/last.ckpt"]) == (b"step-1", b"y" * 50_000)


async def opened(volume: Volume, parent: int, name: bytes, data: bytes) -> int:
    """Begin a file and leave it open."""
    ino = (await volume.make(parent, name, FILE, 0, 0)).ino
    volume.open(ino)
    await volume.write(ino, 0, data)
    return ino


async def closed(volume: Volume, ino: int, *, died: bool = False) -> None:
    await volume.flush(ino, died=lambda: died)
    volume.close(ino)


async def test_a_generation_counts_when_the_last_of_its_files_is_closed() -> None:
    async with mounted(await formatted(small_device())) as volume:
        one = await opened(volume, ROOT, b"model-5.pt", archive())
        other = await opened(volume, ROOT, b"optimizer-5.pt", archive())
        await closed(volume, one)
        assert states(volume) == {5: "writing"}
        await closed(volume, other)
        assert states(volume) == {5: "complete"}
        step = await directory(volume, b"checkpoint-6")
        log_file = await opened(volume, step, b"train.log", b"never closed")
        late = await opened(volume, step, b"rng_state_1.bin", b"x" * 9000)
        await put(volume, step, b"trainer_state.json", b"{}")
        assert states(volume)[6] == "writing"
        await closed(volume, late)
        assert states(volume)[6] == "complete"
        await closed(volume, log_file)


async def test_a_file_in_doubt_speaks_for_its_whole_generation() -> None:
    async with mounted(await formatted(small_device())) as volume:
        step = await directory(volume, b"step-5")
        shard = await opened(volume, step, b"__0_0.distcp", b"x" * 9000)
        await closed(volume, shard, died=True)
        await put(volume, step, b".metadata", b"m" * 100)
        assert states(volume) == {5: "incomplete"}
        volume.open(shard)
        await volume.setattr(shard, size=0)
        assert row(volume, 5)["reason"] is None
        await volume.write(shard, 0, b"x" * 9000)
        await closed(volume, shard)
        assert states(volume) == {5: "writing"}, "the marker is older than the shard"
        await volume.unlink(step, b".metadata")
        await put(volume, step, b".metadata", b"m" * 100)
        assert states(volume) == {5: "complete"}
        late = await opened(volume, step, b"__1_0.distcp", b"x" * 9000)
        await closed(volume, late, died=True)
        assert states(volume) == {5: "incomplete"}, "evidence that comes late counts too"
        await volume.unlink(step, b"__1_0.distcp")
        await volume.rename(step, b".metadata", step, b".metadata.tmp")
        await volume.rename(step, b".metadata.tmp", step, b".metadata")
        assert states(volume) == {5: "complete"}


async def test_whoever_sets_commit_knows_better() -> None:
    async with mounted(await formatted(small_device())) as volume:
        ino = await opened(volume, ROOT, b"step-5.npz", b"in a format of our own")
        await volume.setxattr(ino, b"user.retainz.commit", b"1")
        assert states(volume) == {5: "complete"}
        await closed(volume, ino)
        assert states(volume) == {5: "complete"}


async def test_a_save_that_was_given_up_is_told_by_the_next() -> None:
    async with mounted(await formatted(small_device())) as volume:
        left = await directory(volume, b"checkpoint-1")
        await put(volume, left, b"model.bin", b"x" * 9000)
        slow = await directory(volume, b"checkpoint-2")
        ino = await opened(volume, slow, b"model.bin", b"x" * 9000)
        step = await directory(volume, b"checkpoint-3")
        await put(volume, step, b"trainer_state.json", b"{}")
        assert states(volume) == {1: "incomplete", 2: "writing", 3: "complete"}
        await closed(volume, ino)
        await put(volume, slow, b"trainer_state.json", b"{}")
        await put(volume, left, b"trainer_state.json", b"{}")
        assert states(volume) == {1: "complete", 2: "complete", 3: "complete"}


async def test_a_file_that_is_not_durable_yet_is_written_again() -> None:
    async with mounted(await formatted(small_device()), commit=5.0) as volume:
        ino = await put(volume, ROOT, b"step-1.pt", archive())
        assert states(volume) == {1: "complete"}
        volume.open(ino)
        await volume.setattr(ino, size=0)
        assert states(volume) == {1: "writing"}
        await volume.write(ino, 0, archive()[:100])
        await closed(volume, ino, died=True)
        assert states(volume) == {1: "incomplete"}


async def test_sizes_are_not_learned_from_a_torn_file() -> None:
    """Half of a save that was torn when it was repeated must not pass for a whole one later."""
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"step-2.msgpack", b"x" * 90_000)
        await put(volume, ROOT, b"step-1.msgpack", b"x" * 90_000)
        volume.open(ino)
        await volume.setattr(ino, size=0)
        await volume.write(ino, 0, b"x" * 9000)
        await closed(volume, ino, died=True)
        await volume.unlink(ROOT, b"step-1.msgpack")
        await put(volume, ROOT, b"step-3.msgpack", b"x" * 90_000)
        await closed(volume, await opened(volume, ROOT, b"step-4.msgpack", b"x" * 9000))
        assert states(volume) == {2: "incomplete", 3: "complete", 4: "incomplete"}
    async with mounted(device) as volume:
        await closed(volume, await opened(volume, ROOT, b"step-5.msgpack", b"x" * 45_000))
        assert states(volume)[5] == "incomplete"


@pytest.mark.parametrize("cut", [False, True])
async def test_a_refused_range_counts_until_it_is_written_or_cut_off(cut: bool) -> None:
    async with mounted(await formatted(small_device(zones=24))) as volume:
        filler = await put(volume, ROOT, b"filler", b"")
        ino = await opened(volume, ROOT, b"step-2.msgpack", b"x" * 100_000)
        volume.open(filler)
        with pytest.raises(NoSpace):
            await fill_up(volume, filler)
        with pytest.raises(NoSpace):  # noqa: PT012
            for at in range(100_000, 1 << 30, 100_000):
                await volume.write(ino, at, b"x" * 100_000)
        await volume.flush(ino)
        assert row(volume, 2)["reason"] == "a write to it failed"
        await volume.setattr(filler, size=0)
        await volume.write(ino, 0, b"y" * 50_000)
        await volume.flush(ino)
        assert states(volume) == {2: "incomplete"}
        if cut:
            await volume.setattr(ino, size=at)
        else:
            await volume.write(ino, at, b"x" * 60_000)
            await volume.flush(ino)
            assert states(volume) == {2: "incomplete"}
            await volume.write(ino, at + 50_000, b"x" * 50_000)
        await closed(volume, ino)
        assert states(volume) == {2: "complete"}
        await closed(volume, filler)


async def test_a_tracker_is_followed_after_a_remount(mount: Options) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        step = await directory(volume, b"global_step5")
        await put(volume, step, b"states.pt", archive())
        await put(volume, ROOT, b"latest", b"global_step5")
    async with mounted(device, mount) as volume:
        step = await directory(volume, b"global_step6")
        await put(volume, step, b"states.pt", archive())
        assert states(volume) == {5: "complete", 6: "writing"}
        tracker = volume.lookup(ROOT, b"latest").ino
        await volume.write(tracker, 0, b"global_step6")
        await volume.flush(tracker)
        assert states(volume) == {5: "complete", 6: "complete"}


async def test_what_a_tracker_says_is_durable_when_it_is_closed() -> None:
    device = await formatted(small_device())
    with until_power_cut():
        async with mounted(device) as volume:
            step = await directory(volume, b"global_step5")
            await put(volume, step, b"mp_rank_00_model_states.pt", archive())
            ino = (await volume.make(ROOT, b"latest", FILE, 0, 0)).ino
            volume.open(ino)
            await volume.write(ino, 0, b"global_step5")
            await volume.fsync(ino)
            await volume.flush(ino)
            assert states(volume) == {5: "complete"}
            device.cut_at = device.operations + 1
            await volume.make(ROOT, b"more", FILE, 0, 0)
            await volume.syncfs()
    survivor = device.after_cut(random.Random(1))
    await survivor.start()
    async with mounted(survivor) as volume:
        assert states(volume) == {5: "complete"}


async def test_a_save_whose_bytes_are_lost_costs_no_older_one() -> None:
    """Its evidence is logged before it is known that no zone takes its bytes."""
    device = await formatted(small_device())
    async with mounted(device) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
        await put(volume, ROOT, b"step-1.pt", archive(90_000))
        zones = device.fail("append", zones=range(METADATA_ZONES_MIN, 48))
        ino = await opened(volume, ROOT, b"step-2.pt", archive(90_000))
        with pytest.raises(DeviceError):
            await volume.flush(ino)
        volume.close(ino)
        device.faults.remove(zones)
        await volume.committer.commit()
        assert states(volume) == {1: "complete", 2: "incomplete"}
        await put(volume, ROOT, b"step-3.pt", archive(90_000))
        await volume.committer.commit()
        await trio.testing.wait_all_tasks_blocked()
        assert states(volume) == {2: "incomplete", 3: "complete"}
