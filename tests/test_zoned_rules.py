"""The zone rules against a device itself, with nothing of ours in front of it.

Over `KernelDevice` the rules refuse what the device would refuse, so that what the device does then
is never seen. Here every command reaches it.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retainzfs._zio import CLOSE_ZONE, FINISH_ZONE, OPEN_ZONE, RESET_ZONE, report_zones
from retainzfs.device import BLOCK, Condition
from retainzfs.device.rules import ZoneRules
from retainzfs.errors import ZoneRuleError
from tests.device_backends import CAPACITY_BELOW_SIZE, random_blocks, zoned_target

pytestmark = pytest.mark.zoned

# No append of these is as long as what lies between capacity and the next zone: the kernel would
# split one that passes the border, and its first part would be written.
GEOMETRY = CAPACITY_BELOW_SIZE
ZONES = st.integers(0, 8)
OPERATIONS = st.one_of(
    st.tuples(
        st.just("append"),
        ZONES,
        st.sampled_from([1, 2, 15, 16, 40, 63, 64]),
        st.sampled_from([0] * 9 + [BLOCK, -BLOCK]),
    ),
    st.tuples(st.sampled_from(["open", "close", "finish", "reset"]), ZONES),
)
REQUESTS = {"open": OPEN_ZONE, "close": CLOSE_ZONE, "finish": FINISH_ZONE, "reset": RESET_ZONE}


class Raw:
    """A zoned block device through the kernel's calls alone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def do(self, operation: Any) -> bool:
        """Do it, at the pointer that the device reports; whether the device did."""
        try:
            match operation:
                case "append", zone, blocks, shift:
                    at = self.pointer(zone) + shift
                    if at < 0:
                        return False
                    os.pwrite(self.fd, random_blocks(blocks), zone * GEOMETRY.zone_size + at)
                case name, zone:
                    self.command(REQUESTS[name], zone, 1)
        except OSError:
            return False
        return True

    def command(self, request: int, zone: int, count: int) -> None:
        size = GEOMETRY.zone_size
        sectors = struct.pack("QQ", zone * size // 512, count * size // 512)
        fcntl.ioctl(self.fd, request, sectors)

    def pointer(self, zone: int) -> int:
        condition, pointer = self.report()[zone]
        return GEOMETRY.zone_capacity if condition == Condition.FULL else pointer

    def report(self) -> list[tuple[Condition, int]]:
        """Condition and pointer of every zone; a full one has none, so that it is 0 here."""
        told = []
        for start, _, _, pointer, _, condition in report_zones(self.fd, 0, GEOMETRY.zone_count):
            full = condition == Condition.FULL
            told.append((Condition(condition), 0 if full else pointer - start))
        return told


@contextmanager
def emptied() -> Iterator[Raw]:
    fd = os.open(zoned_target(GEOMETRY), os.O_RDWR | os.O_EXCL | os.O_DIRECT)
    try:
        raw = Raw(fd)
        raw.command(RESET_ZONE, 0, GEOMETRY.zone_count)
        yield raw
    finally:
        os.close(fd)


def allowed(rules: ZoneRules, operation: Any) -> bool:
    """Do it by the rules; whether they allow it."""
    try:
        match operation:
            case "append", zone, blocks, shift:
                pointer = rules.report_zone(zone).write_pointer
                rules.begin_append(zone, pointer + shift, blocks * BLOCK)
                rules.end_append(zone)
            case "open", zone:
                rules.open_zone(zone)
            case "close", zone:
                rules.close_zone(zone)
            case "finish", zone:
                rules.finish(zone)
            case "reset", zone:
                rules.reset([zone])
    except ZoneRuleError:
        return False
    return True


def check(rules: ZoneRules, raw: Raw, operation: Any) -> None:
    """Do it on both and compare. At its limit of open zones a device may close one that is open
    implicitly even if it then refuses the command (QEMU does): the rules follow it there."""
    done = allowed(rules, operation)
    assert raw.do(operation) == done, operation
    for zone, (told, state) in enumerate(zip(raw.report(), rules.states, strict=True)):
        choice = (state.condition, told[0]) == (Condition.IMPLICIT_OPEN, Condition.CLOSED)
        if choice and not done:
            rules.adopt(zone, *told)
        pointer = 0 if state.condition == Condition.FULL else state.pointer
        assert told == (state.condition, pointer), (operation, zone)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(OPERATIONS, max_size=40))
def test_the_rules_are_those_of_the_device(operations: list[Any]) -> None:
    rules = ZoneRules("rules", GEOMETRY)
    with emptied() as raw:
        for operation in operations:
            check(rules, raw, operation)


def test_the_device_counts_its_slots() -> None:
    """What the property above may miss by chance: every slot taken, and then one more."""
    rules = ZoneRules("rules", GEOMETRY)
    opened: list[Any] = [("open", zone) for zone in range(GEOMETRY.max_open + 1)]
    filled: list[Any] = [("append", zone, 1, 0) for zone in range(GEOMETRY.max_active + 2)]
    more: list[Any] = [("finish", 8), ("close", 0), ("append", 9, 1, 0), ("reset", 1), *filled]
    with emptied() as raw:
        for operation in [*opened, *filled, *more]:
            check(rules, raw, operation)
