"""Idle compaction: a zone that is mostly dead is moved while nobody writes, and not before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from retainzfs.device import Geometry
from retainzfs.device.memory import MemoryDevice
from retainzfs.volume import ROOT, Volume
from tests.helpers import DIRECTORY, FILE, content, formatted, noise, put, zones_of
from tests.simulation import deterministic, options

pytestmark = pytest.mark.volume

ZONE = 256 << 10
CADENCE_S = 60
SIZE = 15 * 4096  # four of them fill a zone
PIECE = 128 << 10  # of a log; so much has to be written for a zone's copy to be a small part of it


async def mostly_dead(volume: Volume) -> int:
    """Leave one file in a zone that stays occupied for hours for it; return its inode. Another
    zone has a tail that takes it."""
    top = (await volume.make(ROOT, b"run", DIRECTORY, 0, 0)).ino
    for name, value in ((b"keep_last", 200), (b"cadence", CADENCE_S), (b"size", SIZE)):
        await volume.setxattr(top, b"user.retainz." + name, b"%d" % value)
    inos = []
    for number in range(1, 7):
        inos.append(await put(volume, top, b"step-%d.pt" % number, noise(SIZE, number)))
        await volume.syncfs()
        await trio.sleep(1)
    first = zones_of(volume, inos[0])
    there = [number for number, ino in enumerate(inos, 1) if zones_of(volume, ino) == first]
    assert len(there) > 2, "the first ones share a zone"
    for number in there[:-1]:
        await volume.unlink(top, b"step-%d.pt" % number)
    await volume.syncfs()
    return inos[there[-1] - 1]


def run(policy: str, busy_s: int = 0) -> tuple[int, int]:
    """Return the zones moved while somebody writes every second, and those moved after that."""

    async def replayed() -> tuple[int, int]:
        device = await formatted(MemoryDevice(Geometry(ZONE, ZONE, 24, 8, 14)))
        async with Volume.mounted(device, replace(options(), policy=policy)) as volume:
            kept = await mostly_dead(volume)
            log = (await volume.make(ROOT, b"log", FILE, 0, 0)).ino
            for _ in range(busy_s):
                await volume.write(log, 0, noise(PIECE))
                await trio.sleep(1)
            busy = volume.statistics()["compactions"]
            (before,) = zones_of(volume, kept)
            data = await content(volume, kept)
            await trio.sleep(CADENCE_S)
            told = volume.statistics()
            if told["compactions"]:
                assert volume.table[before].write_pointer == 0, "its zone is reset"
                assert SIZE <= told["compacted_bytes"] < 2 * SIZE, "only what lived there"
            assert await content(volume, kept) == data
            assert (told["collections"], told["copied_bytes"]) == (0, 0), "counted apart"
            return busy, told["compactions"]

    return deterministic(1, replayed)


def test_a_zone_that_is_mostly_dead_is_moved_when_nobody_writes() -> None:
    assert run("plan", busy_s=30) == (0, 1)


def test_a_policy_that_does_not_ask_for_it_moves_nothing() -> None:
    assert run("plan-bare") == (0, 0)
