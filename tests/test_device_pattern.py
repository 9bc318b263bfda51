"""A device that keeps how to make its bytes gives back what was written, whatever that was."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from retainzfs._zio import Slot
from retainzfs.device import BLOCK, Condition
from retainzfs.device.faults import PowerCut
from retainzfs.device.memory import MemoryDevice
from retainzfs.device.pattern import PERIOD, UNIT, Pattern, PatternDevice
from tests.device_backends import GEOMETRY, HEADER

pytestmark = pytest.mark.volume

PATTERN = Pattern(1)
BLOCKS = GEOMETRY.zone_capacity // BLOCK
KEY_MAX = (1 << 64) - UNIT * 4


def blocks(*pieces: bytes | bytearray) -> memoryview:
    """Return the pieces one behind the other, in aligned memory."""
    data = b"".join(pieces)
    view = memoryview(Slot(len(data)))
    view[:] = data
    return view


class Draws:
    """What an append of a test may hold."""

    pattern = st.tuples(st.integers(0, KEY_MAX), st.integers(1, 12)).map(
        lambda drawn: bytes(PATTERN.make(*drawn))
    )
    foreign = st.sampled_from(  # the last one says the greatest key, behind which there is none
        (bytes(BLOCK), b"\1" * BLOCK, bytes(Pattern(2).make(7, 2)), b"\xff" * 2 * BLOCK)
    )
    nearly = st.tuples(st.integers(0, 99), st.integers(1, 9), st.integers(0, 1 << 20)).map(
        lambda drawn: flipped(PATTERN.make(drawn[0], drawn[1]), drawn[2])
    )
    append = st.tuples(st.lists(pattern | foreign | nearly, min_size=1, max_size=4), st.booleans())


def flipped(data: bytearray, byte: int) -> bytes:
    data[byte % len(data)] ^= 4
    return bytes(data)


@given(st.integers(0, KEY_MAX), st.integers(1, UNIT * 3), st.data())
def test_a_block_depends_on_its_key_alone(key: int, count: int, data: st.DataObject) -> None:
    made = PATTERN.make(key, count)
    at = data.draw(st.integers(0, count - 1))
    assert made[at * BLOCK : (at + 1) * BLOCK] == PATTERN.make(key + at, 1)
    assert PATTERN.match(memoryview(made)) == (key, count)


def test_no_block_is_another() -> None:
    made = PATTERN.make(0, 3 * PERIOD)
    cut = {bytes(made[at : at + BLOCK]) for at in range(0, len(made), BLOCK)}
    assert len(cut) == 3 * PERIOD
    assert len({block[8:] for block in cut}) == PERIOD


@given(st.lists(Draws.append, max_size=8), st.data())
def test_what_comes_back_is_what_was_written(
    appends: list[tuple[list[bytes], bool]], data: st.DataObject
) -> None:
    async def compare() -> None:
        plain, patterned = MemoryDevice(GEOMETRY), PatternDevice(GEOMETRY, PATTERN)
        at = 0
        for pieces, headed in appends:
            view, header = blocks(*pieces), HEADER if headed else b""
            if at + len(view) + BLOCK > GEOMETRY.zone_capacity:
                break
            expected = await plain.append(0, at, view, header)
            assert await patterned.append(0, at, view, header) == expected
            at += len(view) + (BLOCK if headed else 0)
        await plain.finish(0)
        await patterned.finish(0)
        first = data.draw(st.integers(0, BLOCKS - 1))
        count = data.draw(st.integers(1, BLOCKS - first))
        for where, length in ((0, BLOCKS), (first, count)):
            wanted = await plain.read(0, where * BLOCK, length * BLOCK)
            assert await patterned.read(0, where * BLOCK, length * BLOCK) == wanted

    trio.run(compare)


async def test_a_pattern_that_goes_on_takes_one_piece() -> None:
    device = PatternDevice(GEOMETRY, PATTERN)
    for at in range(0, BLOCKS - 4, 4):
        await device.append(0, at * BLOCK, blocks(PATTERN.make(at, 4)))
    assert device.pieces == 1
    await device.append(0, (BLOCKS - 4) * BLOCK, blocks(PATTERN.make(0, 4)))
    assert device.pieces == 2
    assert device.report_zone(0).condition == Condition.FULL
    await device.reset([0])
    assert device.pieces == 0


async def test_a_power_cut_loses_what_was_not_flushed() -> None:
    """Resets and finishes too."""
    device = PatternDevice(GEOMETRY, PATTERN)
    first, second = PATTERN.make(0, 3), PATTERN.make(1000, 2)
    for zone in range(3):
        await device.append(zone, 0, blocks(first))
    await device.flush()
    before = [device.report_zone(zone).write_pointer for zone in range(4)]
    await device.append(0, 3 * BLOCK, blocks(second))
    await device.finish(1)
    await device.reset([2])
    await device.append(2, 0, blocks(second))
    await device.append(3, 0, blocks(second))
    assert device.power_cycle() == 4 * BLOCK
    await device.start()
    assert [device.report_zone(zone).write_pointer for zone in range(4)] == before
    for zone in range(3):
        assert await device.read(zone, 0, 3 * BLOCK) == first
        await device.append(zone, 3 * BLOCK, blocks(second))
        assert await device.read(zone, 0, 5 * BLOCK) == first + second


async def test_nothing_works_between_a_power_cut_and_the_next_start() -> None:
    device = PatternDevice(GEOMETRY, PATTERN)
    data = blocks(PATTERN.make(0, 2))
    await device.append(0, 0, data)
    await device.flush()
    device.cut_at = 4 * BLOCK
    with pytest.raises(PowerCut):
        await device.append(0, 2 * BLOCK, data)
    for call in (
        lambda: device.append(0, 4 * BLOCK, data),
        device.flush,
        lambda: device.reset([0]),
        lambda: device.finish(0),
        lambda: device.read(0, 0, BLOCK),
    ):
        with pytest.raises(PowerCut):
            await call()
    assert device.power_cycle() == 2 * BLOCK
    await device.start()
    assert await device.read(0, 0, 2 * BLOCK) == PATTERN.make(0, 2)
    await device.append(0, 2 * BLOCK, data)
