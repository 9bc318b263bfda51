"""A file with names in several generations lives in all of them."""

from __future__ import annotations

import contextlib
import random

import pytest

from retainzfs import fsck
from retainzfs.volume import ROOT, FSError, Volume
from tests.helpers import (
    content,
    formatted,
    mounted,
    put,
    small_device,
    zones_of,
)
from tests.quiescence import check_quiescent
from tests.test_retention import archive, closed, directory, opened, row, states
from tests.test_retention_cases import names, remove, settled

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(5)]


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
