"""Retention where it is hard: reused numbers, announced sizes, several jobs, odd names."""

from __future__ import annotations

import json
import random

import pytest
import trio.testing

from retainzfs import fsck
from retainzfs.volume import ROOT, Volume
from tests.helpers import (
    content,
    formatted,
    mounted,
    put,
    small_device,
)
from tests.test_retention import archive, closed, directory, opened, row, states

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(5)]


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
