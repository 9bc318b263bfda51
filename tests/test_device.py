"""What every device must do, over each backend; and random operations on two backends at once."""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retainzfs._zio import crc32c, crc32c_blocks
from retainzfs.device import BLOCK, Condition, Device
from retainzfs.device.emulated import EmulatedDevice
from retainzfs.device.memory import MemoryDevice
from retainzfs.errors import ChecksumError, ZoneRuleError
from tests.device_backends import (
    CAPACITY_BELOW_SIZE,
    EMULATIONS,
    GEOMETRY,
    HEADER,
    NO_LIMITS,
    Backend,
    Emulated,
    Kernel,
    Memory,
    random_blocks,
)

pytestmark = pytest.mark.volume

CAPACITY = GEOMETRY.zone_capacity
BLOCKS = CAPACITY // BLOCK


@pytest.fixture(
    params=[*EMULATIONS, pytest.param(Kernel(), marks=pytest.mark.zoned)],
    ids=lambda backend: backend.name,
)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


@pytest.fixture
async def device(backend: Backend, tmp_path: Path) -> AsyncIterator[Device]:
    device = await backend.create(tmp_path)
    yield device
    await device.aclose()


def condition(device: Device, zone: int) -> Condition:
    return device.report()[zone].condition


def pointer(device: Device, zone: int) -> int:
    return device.report()[zone].write_pointer


async def refused(call: Awaitable[Any], device: Device, text: str) -> None:
    """The call breaks a rule, says so, and changes nothing."""
    before = device.report()
    with pytest.raises(ZoneRuleError, match=text):
        await call
    assert device.report() == before


class TestEveryDevice:
    async def test_a_new_device_is_empty(self, device: Device) -> None:
        assert device.geometry == GEOMETRY
        assert [zone.index for zone in device.report()] == list(range(16))
        assert {zone[1:] for zone in device.report()} == {(Condition.EMPTY, 0, CAPACITY)}

    async def test_append_moves_the_pointer_and_reads_back(self, device: Device) -> None:
        first, second = random_blocks(3), random_blocks(2)
        await device.append(1, 0, first)
        sums = await device.append(1, 3 * BLOCK, second)
        assert condition(device, 1) == Condition.IMPLICIT_OPEN
        assert pointer(device, 1) == 5 * BLOCK
        assert bytes(await device.read(1, 0, 5 * BLOCK)) == bytes(first) + bytes(second)
        assert bytes(await device.read(1, BLOCK, BLOCK)) == bytes(first[BLOCK : 2 * BLOCK])
        assert sums == (crc32c_blocks(second), 0)

    async def test_append_with_a_trailer(self, device: Device) -> None:
        data = random_blocks(20)
        sums = await device.append(0, 0, data, HEADER)
        trailer = bytes(await device.read(0, 20 * BLOCK, BLOCK))
        assert pointer(device, 0) == 21 * BLOCK
        assert trailer == (HEADER + crc32c_blocks(data)).ljust(BLOCK, b"\0")
        assert sums == (crc32c_blocks(data), crc32c(trailer))
        assert device.statistics()["appended_bytes"] == 21 * BLOCK

    async def test_append_takes_part_of_a_buffer(self, device: Device) -> None:
        data = random_blocks(4)
        await device.append(0, 0, data[BLOCK : 3 * BLOCK])
        assert bytes(await device.read(0, 0, 2 * BLOCK)) == bytes(data[BLOCK : 3 * BLOCK])

    async def test_reaching_the_capacity_makes_full(self, device: Device) -> None:
        await device.append(0, 0, random_blocks(BLOCKS - 2))
        await refused(
            device.append(0, CAPACITY - 2 * BLOCK, random_blocks(2), HEADER), device, "capacity"
        )
        await device.append(0, CAPACITY - 2 * BLOCK, random_blocks(1), HEADER)
        assert condition(device, 0) == Condition.FULL
        assert device.statistics()["active"] == 0
        await refused(device.append(0, CAPACITY, random_blocks(1)), device, "that is full")

    async def test_capacity_below_the_zone_size(self, backend: Backend, tmp_path: Path) -> None:
        device = await backend.create(tmp_path, CAPACITY_BELOW_SIZE)
        last, first = random_blocks(BLOCKS), random_blocks(BLOCKS)
        await device.append(0, 0, last)
        await device.append(1, 0, first)
        assert [condition(device, zone) for zone in (0, 1)] == [Condition.FULL] * 2
        assert bytes(await device.read(0, 0, CAPACITY)) == bytes(last)
        assert bytes(await device.read(1, 0, CAPACITY)) == bytes(first)
        await refused(device.read(0, CAPACITY, BLOCK), device, "passes the write pointer")
        await device.aclose()

    @pytest.mark.parametrize("offset", [0, BLOCK, 3 * BLOCK, 100])
    async def test_append_elsewhere(self, device: Device, offset: int) -> None:
        await device.append(0, 0, random_blocks(2))
        await refused(device.append(0, offset, random_blocks(1)), device, "write pointer is 8192")

    async def test_append_of_what_cannot_be_written(self, device: Device) -> None:
        data = random_blocks(2)
        await refused(device.append(0, 0, data[:0]), device, "not whole blocks")
        await refused(device.append(0, 0, data[:100]), device, "not whole blocks")
        await refused(device.append(0, 0, data[512 : BLOCK + 512]), device, "not aligned")
        await refused(device.append(0, 0, data, b"short"), device, "header of 5 bytes")
        await refused(device.append(99, 0, data), device, "no such zone; there are 16")
        await refused(device.append(-1, 0, data), device, "no such zone")

    async def test_reads_that_are_refused(self, device: Device) -> None:
        await device.append(0, 0, random_blocks(2))
        for offset, length in ((0, 3 * BLOCK), (2 * BLOCK, BLOCK)):
            await refused(device.read(0, offset, length), device, "passes the write pointer 8192")
        for offset, length in ((0, 100), (1, BLOCK), (-BLOCK, BLOCK), (0, 0)):
            await refused(device.read(0, offset, length), device, "not whole blocks")
        await refused(device.read(16, 0, BLOCK), device, "no such zone")

    async def test_read_verifies(self, device: Device) -> None:
        data = random_blocks(5)
        sums = (await device.append(0, 0, data)).blocks
        assert bytes(await device.read(0, BLOCK, 4 * BLOCK, sums[4:])) == bytes(data[BLOCK:])
        wrong = bytearray(sums)
        wrong[13] ^= 1
        with pytest.raises(ChecksumError) as caught:
            await device.read(0, BLOCK, 4 * BLOCK, bytes(wrong[4:]))
        assert caught.value.args == (device.name, 0, 3 * BLOCK)

    async def test_active_limit(self, device: Device) -> None:
        for zone in range(6):
            await device.append(zone, 0, random_blocks(1))
        assert device.statistics()["active"] == 6
        await refused(device.append(6, 0, random_blocks(1)), device, "limit is 6")
        await refused(device.open_zone(6), device, "limit is 6")
        await device.append(0, BLOCK, random_blocks(1))  # one that is active goes on
        await device.finish(0)
        await device.append(6, 0, random_blocks(1))

    async def test_open_limit_closes_the_zone_opened_first(self, device: Device) -> None:
        """The choice is the device's (ZNS 1.1, 2.1.1.4.1); QEMU's and ours is this."""
        for zone in (0, 1, 2, 3):
            await device.append(zone, 0, random_blocks(1))
        await device.append(0, BLOCK, random_blocks(1))
        await device.append(3, BLOCK, random_blocks(1))
        assert {condition(device, zone) for zone in range(4)} == {Condition.IMPLICIT_OPEN}
        await device.append(4, 0, random_blocks(1))
        assert device.statistics()["open"] == 4
        assert [condition(device, zone) for zone in (0, 1)] == [
            Condition.CLOSED,
            Condition.IMPLICIT_OPEN,
        ]

    async def test_open_limit_never_closes_an_explicit_zone(self, device: Device) -> None:
        for zone in range(4):
            await device.open_zone(zone)
        await refused(device.append(4, 0, random_blocks(1)), device, "open explicitly")
        await refused(device.open_zone(4), device, "open explicitly")
        await device.close_zone(0)
        assert condition(device, 0) == Condition.CLOSED  # without data too
        await device.append(4, 0, random_blocks(1))

    async def test_no_limits(self, backend: Backend, tmp_path: Path) -> None:
        device = await backend.create(tmp_path, NO_LIMITS)
        for zone in range(16):
            await device.append(zone, 0, random_blocks(1))
        assert device.statistics()["open"] == 16
        await device.aclose()

    async def test_open_and_close(self, device: Device) -> None:
        await device.open_zone(0)
        await device.open_zone(0)
        assert condition(device, 0) == Condition.EXPLICIT_OPEN
        await device.append(0, 0, random_blocks(1))
        assert condition(device, 0) == Condition.EXPLICIT_OPEN
        await device.close_zone(0)
        await device.close_zone(0)
        assert condition(device, 0) == Condition.CLOSED
        await device.append(0, BLOCK, random_blocks(1))
        assert condition(device, 0) == Condition.IMPLICIT_OPEN
        await device.finish(0)
        await refused(device.open_zone(0), device, "open of a zone that is full")
        await refused(device.close_zone(0), device, "close of a zone that is full")
        await refused(device.close_zone(1), device, "close of a zone that is empty")

    async def test_finish(self, device: Device) -> None:
        data = random_blocks(1)
        await device.append(0, 0, data)
        for zone in (0, 1, 0):
            await device.finish(zone)
        assert [condition(device, zone) for zone in (0, 1)] == [Condition.FULL] * 2
        assert bytes(await device.read(0, 0, BLOCK)) == bytes(data)
        assert device.statistics()["active"] == 0

    async def test_finish_of_an_empty_zone_needs_no_free_resource(self, device: Device) -> None:
        for zone in range(6):
            await device.append(zone, 0, random_blocks(1))
        await device.finish(6)
        assert condition(device, 6) == Condition.FULL

    async def test_reset(self, device: Device) -> None:
        await device.append(0, 0, random_blocks(1))
        await device.open_zone(1)
        await device.finish(2)
        await device.reset([0, 1, 2, 3, 2])
        assert {zone[1:3] for zone in device.report()} == {(Condition.EMPTY, 0)}
        assert device.statistics()["resets"] == 3  # one was empty
        await refused(device.read(0, 0, BLOCK), device, "passes the write pointer 0")
        again = random_blocks(2)
        await device.append(0, 0, again)
        assert bytes(await device.read(0, 0, 2 * BLOCK)) == bytes(again)

    async def test_reset_is_all_or_nothing(self, device: Device) -> None:
        await device.append(0, 0, random_blocks(1))
        await refused(device.reset([0, 16]), device, "no such zone")
        await device.reset([])
        assert pointer(device, 0) == BLOCK

    async def test_statistics(self, device: Device) -> None:
        await device.append(0, 0, random_blocks(2))
        await device.append(1, 0, random_blocks(1))
        await device.read(0, 0, BLOCK)
        await device.close_zone(1)
        await device.finish(2)
        await device.flush()
        statistics = device.statistics()
        expected = {"appended_bytes": 3 * BLOCK, "read_bytes": BLOCK, "open": 1, "active": 2}
        assert statistics | expected | {"flushes": 1, "finishes": 1, "resets": 0} == statistics

    async def test_what_was_flushed_outlives_a_power_cycle(
        self, backend: Backend, tmp_path: Path
    ) -> None:
        device = await backend.create(tmp_path)
        data = random_blocks(2)
        await device.append(0, 0, data)
        await device.open_zone(1)
        await device.open_zone(2)
        await device.append(2, 0, data)
        await device.close_zone(2)
        await device.finish(3)
        await device.flush()
        device = await backend.reopen(device)
        assert [zone[1:3] for zone in device.report()[:4]] == [
            (Condition.CLOSED, 2 * BLOCK),  # open before
            (Condition.EMPTY, 0),  # open without data
            (Condition.CLOSED, 2 * BLOCK),
            (Condition.FULL, CAPACITY),
        ]
        assert bytes(await device.read(0, 0, 2 * BLOCK)) == bytes(data)
        await device.append(0, 2 * BLOCK, data)
        assert device.statistics()["active"] == 2
        await device.aclose()

    async def test_zones_are_written_and_read_at_the_same_time(self, device: Device) -> None:
        written: dict[int, list[bytes]] = {zone: [] for zone in range(4)}

        async def write(zone: int) -> None:
            for i in range(12):
                data = random_blocks(1 + (i + zone) % 4)
                offset = pointer(device, zone)
                sums = await device.append(zone, offset, data)
                written[zone].append(bytes(data))
                found = await device.read(zone, offset, len(data), sums.blocks)
                assert bytes(found) == bytes(data)

        async def flush() -> None:
            for _ in range(10):
                await device.flush()

        async with trio.open_nursery() as nursery:
            for zone in written:
                nursery.start_soon(write, zone)
            nursery.start_soon(flush)
        for zone, pieces in written.items():
            found = await device.read(zone, 0, pointer(device, zone))
            assert bytes(found) == b"".join(pieces)

    @pytest.mark.parametrize("operation", ["append", "read", "flush"])
    async def test_cancellation_waits_for_the_device(self, device: Device, operation: str) -> None:
        """A buffer must not be free while the device may use it, so the operation ends first."""
        data = random_blocks(4)
        if operation != "append":
            await device.append(0, 0, data)
        with trio.CancelScope() as scope:
            scope.cancel()
            if operation == "append":
                await device.append(0, 0, data)
            elif operation == "read":
                assert bytes(await device.read(0, 0, 4 * BLOCK)) == bytes(data)
            else:
                await device.flush()
        assert pointer(device, 0) == 4 * BLOCK
        assert bytes(await device.read(0, 0, 4 * BLOCK)) == bytes(data)


# --- zones that fail: those of the kernel's devices are in test_zoned.py --------------------------


@pytest.mark.parametrize("backend", EMULATIONS, ids=lambda backend: backend.name, indirect=True)
async def test_a_read_only_zone(device: Device) -> None:
    assert isinstance(device, MemoryDevice | EmulatedDevice)
    data = random_blocks(1)
    await device.append(0, 0, data)
    device.rules.set_condition(0, Condition.READ_ONLY)
    assert bytes(await device.read(0, 0, BLOCK)) == bytes(data)
    for call in (
        device.append(0, BLOCK, data),
        device.reset([0]),
        device.finish(0),
        device.open_zone(0),
        device.close_zone(0),
    ):
        await refused(call, device, "that is read only")


@pytest.mark.parametrize("backend", EMULATIONS, ids=lambda backend: backend.name, indirect=True)
async def test_an_offline_zone(device: Device) -> None:
    assert isinstance(device, MemoryDevice | EmulatedDevice)
    await device.append(0, 0, random_blocks(1))
    device.rules.set_condition(0, Condition.OFFLINE)
    for call in (device.read(0, 0, BLOCK), device.reset([0]), device.finish(0)):
        await refused(call, device, "offline")
    assert device.statistics()["active"] == 0


# --- random operations --------------------------------------------------------------------------

ZONES = st.integers(0, 8)  # more than may be active, few enough to meet again
OPERATIONS = st.one_of(
    st.tuples(
        st.just("append"),
        ZONES,
        st.sampled_from([1, 2, 15, 16, 40, 63, 64, 65]),
        st.booleans(),
        st.sampled_from([0] * 9 + [BLOCK, -BLOCK]),
    ),
    st.tuples(st.just("reset"), st.lists(ZONES, max_size=3)),
    st.tuples(st.sampled_from(["finish", "open_zone", "close_zone"]), ZONES),
    st.tuples(st.just("read"), ZONES, st.integers(0, 20), st.integers(0, 20)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("reopen")),
)


def call(device: Device, operation: Any) -> Awaitable[Any]:
    """Start the operation; what it needs to know it asks the device."""
    match operation:
        case "append", zone, blocks, trailer, shift:
            # The same bytes on every device, other bytes on every call.
            data = random_blocks(blocks)
            data[:] = (blocks * bytes([zone, pointer(device, zone) // BLOCK % 256])) * (BLOCK // 2)
            return device.append(
                zone, pointer(device, zone) + shift, data, HEADER if trailer else b""
            )
        case "read", zone, start, blocks:
            return device.read(zone, start * BLOCK, blocks * BLOCK)
        case ("flush",):
            return device.flush()
        case name, argument:
            method: Callable[[Any], Awaitable[Any]] = getattr(device, name)
            return method(argument)
    raise AssertionError(operation)


async def outcome(device: Device, operation: Any) -> Any:
    if operation[0] == "append":
        await device.ready(operation[1])
    try:
        result = await call(device, operation)
    except ZoneRuleError as error:
        return str(error).replace(device.name, "device")
    return bytes(result) if isinstance(result, memoryview) else result


def check_limits(device: Device) -> None:
    conditions = [zone.condition for zone in device.report()]
    opened = sum(c in (Condition.IMPLICIT_OPEN, Condition.EXPLICIT_OPEN) for c in conditions)
    active = opened + conditions.count(Condition.CLOSED)
    counted = device.statistics()
    assert (opened, active) == (counted["open"], counted["active"])
    assert opened <= GEOMETRY.max_open
    assert active <= GEOMETRY.max_active


async def compare(first: Backend, second: Backend, directory: Path, operations: list[Any]) -> None:
    """Do the same on both; the results and what is on the devices must be the same."""
    one = await first.create(directory)
    other = await second.create(directory)
    try:
        for operation in [*operations, ("reopen",)]:
            if operation == ("reopen",):
                await one.flush()
                await other.flush()
                one = await first.reopen(one)
                other = await second.reopen(other)
            elif operation[0] == "read" and condition(one, operation[1]) == Condition.FULL:
                continue  # above what was written a finished zone has any bytes
            else:
                assert await outcome(other, operation) == await outcome(one, operation)
            assert other.report() == one.report()
            check_limits(one)
            check_limits(other)
        for zone in one.report():
            if zone.write_pointer and zone.condition != Condition.FULL:
                found = [await d.read(zone.index, 0, zone.write_pointer) for d in (one, other)]
                assert bytes(found[0]) == bytes(found[1])
    finally:
        await one.aclose()
        await other.aclose()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(OPERATIONS, max_size=40))
def test_the_emulated_device_does_what_the_memory_device_does(operations: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        trio.run(compare, Memory(), Emulated(), Path(directory), operations)


@pytest.mark.zoned
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(OPERATIONS, max_size=40))
def test_the_emulated_device_does_what_the_kernel_device_does(operations: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        trio.run(compare, Emulated(), Kernel(), Path(directory), operations)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(OPERATIONS, max_size=40))
def test_after_a_crash_the_zones_are_as_last_flushed(operations: list[Any]) -> None:
    async def run(directory: Path) -> None:
        device: Device = await Emulated().create(directory)
        flushed = device.report()
        kept = {zone: b"" for zone in range(GEOMETRY.zone_count)}
        for operation in operations:
            if operation == ("reopen",):
                device = await Emulated().reopen(device)
                assert device.report() == [power_cycled(zone) for zone in flushed]
                for zone, data in kept.items():
                    if data:
                        assert bytes(await device.read(zone, 0, len(data))) == data
                flushed = device.report()
                continue
            await outcome(device, operation)
            if operation == ("flush",):
                flushed = device.report()
                kept = {zone: await contents(device, zone) for zone in kept}
            elif operation[0] == "reset":
                kept |= dict.fromkeys(operation[1], b"")  # may be overwritten before the flush
        await device.aclose()

    with tempfile.TemporaryDirectory() as directory:
        trio.run(run, Path(directory))


def power_cycled(zone: Any) -> Any:
    if zone.condition in (Condition.IMPLICIT_OPEN, Condition.EXPLICIT_OPEN):
        return zone._replace(condition=Condition.CLOSED if zone.write_pointer else Condition.EMPTY)
    return zone


async def contents(device: Device, zone: int) -> bytes:
    report = device.report()[zone]
    if report.write_pointer == 0 or report.condition == Condition.FULL:
        return b""
    return bytes(await device.read(zone, 0, report.write_pointer))
