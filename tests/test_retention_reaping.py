"""Deletion by the filesystem: whole or not at all, and never of what something points at."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import AsyncIterator

import pytest
import trio.testing

from retainzfs import fsck
from retainzfs.layout import BLOCK
from retainzfs.volume import ROOT, FSError, Volume
from tests.helpers import (
    FILE,
    content,
    formatted,
    mounted,
    put,
    small_device,
    tree,
)
from tests.quiescence import check_quiescent
from tests.test_retention import archive, directory, row, states
from tests.test_retention_cases import checkpoint, names, remove, settled
from tests.witness import WatchedDevice

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(5)]


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

        async def told() -> None:
            gone.append(names(volume))
            await trio.lowlevel.checkpoint()

        volume.reaped = told  # type: ignore[method-assign]
        for number in (1, 2):
            await put(volume, ROOT, b"model-%d.pt" % number, archive(90_000))
            await put(volume, ROOT, b"optimizer-%d.pt" % number, archive(90_000))
            await settled(volume)
        assert gone == [{b"model-2.pt", b"optimizer-2.pt"}]
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


async def test_a_writer_waits_for_what_is_being_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room of a retired generation comes back a moment after its name has gone."""
    device = await formatted(small_device())
    async with mounted(device) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
        others = volume.table.capacity  # beside three saves, and what is held back
        save = (volume.statfs().available * BLOCK - others) // 3
        kept = await directory(volume, b"kept")
        await volume.setxattr(kept, b"user.retainz.reap", b"0")
        await put(volume, kept, b"filler.bin", bytes(save))
        await put(volume, ROOT, b"step-1.bin", bytes(save))
        fading, forgotten = trio.Event(), trio.Event()

        async def reaped() -> None:
            fading.set()
            await forgotten.wait()

        monkeypatch.setattr(volume, "reaped", reaped)
        await put(volume, ROOT, b"step-2.bin", bytes(save))
        await fading.wait()
        assert volume.statfs().available * BLOCK < save
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, volume, ROOT, b"step-3.bin", bytes(save))
            await trio.testing.wait_all_tasks_blocked()
            assert volume.copier.copied == 0, "nor is anything copied for what comes for nothing"
            forgotten.set()
        await settled(volume)
        assert states(volume) == {3: "complete"}
