"""The zone state machine alone: what only shows while an append runs, or when it fails."""

from collections.abc import Callable

import pytest

from retainzfs.device import BLOCK, Condition
from retainzfs.device.rules import ZoneRules, ZoneState, first_bad_block
from retainzfs.errors import ZoneRuleError
from tests.device_backends import GEOMETRY

pytestmark = pytest.mark.pure

CAPACITY = GEOMETRY.zone_capacity


@pytest.fixture
def rules() -> ZoneRules:
    return ZoneRules("device", GEOMETRY)


def condition(rules: ZoneRules, zone: int) -> Condition:
    return rules.report()[zone].condition


def append(rules: ZoneRules, zone: int, blocks: int = 1) -> None:
    rules.begin_append(zone, rules.states[zone].pointer, blocks * BLOCK)
    rules.end_append(zone)


@pytest.mark.parametrize(
    "command",
    [
        lambda rules: rules.reset([1, 0]),
        lambda rules: rules.finish(0),
        lambda rules: rules.open_zone(0),
        lambda rules: rules.close_zone(0),
    ],
)
def test_nothing_else_happens_to_a_zone_while_an_append_runs(
    rules: ZoneRules, command: Callable[[ZoneRules], object]
) -> None:
    append(rules, 1)
    rules.begin_append(0, 0, BLOCK)
    before = rules.report()
    with pytest.raises(ZoneRuleError, match="while an append runs"):
        command(rules)
    assert rules.report() == before
    rules.end_append(0)
    assert rules.report()[0].write_pointer == BLOCK


def test_appends_of_a_zone_queue_up_and_end_in_order(rules: ZoneRules) -> None:
    rules.begin_append(0, 0, BLOCK)
    with pytest.raises(ZoneRuleError, match="the write pointer is 4096"):
        rules.begin_append(0, 0, BLOCK)
    rules.begin_append(0, BLOCK, 2 * BLOCK)
    rules.end_append(0)
    assert rules.report()[0].write_pointer == BLOCK
    rules.end_append(0)
    assert rules.report()[0].write_pointer == 3 * BLOCK


def test_what_is_queued_behind_a_failed_append_is_lost(rules: ZoneRules) -> None:
    rules.begin_append(0, 0, BLOCK)
    behind = rules.begin_append(0, BLOCK, BLOCK)
    rules.fail_append(0)
    assert behind.lost
    with pytest.raises(ZoneRuleError, match="behind one that failed"):
        rules.begin_append(0, 0, BLOCK)
    rules.fail_append(0)
    assert rules.report()[0].write_pointer == 0
    append(rules, 0)
    assert rules.report()[0].write_pointer == BLOCK


def test_the_pointer_moves_when_the_append_has_ended(rules: ZoneRules) -> None:
    rules.begin_append(0, 0, CAPACITY)
    assert rules.report()[0][1:3] == (Condition.IMPLICIT_OPEN, 0)
    with pytest.raises(ZoneRuleError):
        rules.check_read(0, 0, BLOCK)
    rules.end_append(0)
    assert rules.report()[0][1:3] == (Condition.FULL, CAPACITY)


def test_a_zone_is_closed_under_a_running_append(rules: ZoneRules) -> None:
    """As on a drive: resources go to the command that comes, the one that runs goes on."""
    for zone in range(5):
        rules.begin_append(zone, 0, BLOCK)
    assert (rules.open, rules.active) == (4, 5)
    assert condition(rules, 0) == Condition.CLOSED
    rules.end_append(0)
    assert rules.report()[0][1:3] == (Condition.CLOSED, BLOCK)
    rules.begin_append(0, BLOCK, CAPACITY - BLOCK)
    assert condition(rules, 1) == Condition.CLOSED
    rules.end_append(0)
    assert condition(rules, 0) == Condition.FULL


def test_a_zone_that_was_closed_and_got_nothing_keeps_its_slot(rules: ZoneRules) -> None:
    for zone in range(5):
        rules.begin_append(zone, 0, BLOCK)
    rules.fail_append(0)
    assert condition(rules, 0) == Condition.CLOSED
    assert rules.active == 5
    rules.power_cycle()
    assert condition(rules, 0) == Condition.EMPTY


def test_a_failed_append_can_be_repeated(rules: ZoneRules) -> None:
    append(rules, 0)
    rules.begin_append(0, BLOCK, BLOCK)
    rules.fail_append(0)
    append(rules, 0)
    assert rules.report()[0][1:3] == (Condition.IMPLICIT_OPEN, 2 * BLOCK)


def test_changes_are_collected(rules: ZoneRules) -> None:
    append(rules, 0)
    append(rules, 3)
    rules.finish(5)
    rules.open_zone(6)
    assert rules.changed == {0, 3, 5, 6}
    rules.changed.clear()
    append(rules, 3)
    rules.reset([0, 1])
    with pytest.raises(ZoneRuleError):
        rules.reset([5, 99])
    assert rules.changed == {0, 3}


def test_resets_are_counted(rules: ZoneRules) -> None:
    for _ in range(3):
        append(rules, 0)
        assert rules.reset([0, 0, 1]) == [0]
    assert [state.resets for state in rules.states[:2]] == [3, 0]


def test_recorded_states_are_taken_over_closed() -> None:
    states = [ZoneState() for _ in range(GEOMETRY.zone_count)]
    states[0] = ZoneState(Condition.IMPLICIT_OPEN, BLOCK, 2)
    states[1] = ZoneState(Condition.EXPLICIT_OPEN, 0)
    states[2] = ZoneState(Condition.FULL, 3 * BLOCK)
    rules = ZoneRules("device", GEOMETRY, states)
    assert [zone[1:3] for zone in rules.report()[:3]] == [
        (Condition.CLOSED, BLOCK),
        (Condition.EMPTY, 0),
        (Condition.FULL, CAPACITY),
    ]
    assert rules.changed == {0, 1}
    assert (rules.open, rules.active) == (0, 1)


def test_active_zones_above_the_limit_come_back_full() -> None:
    states = [ZoneState(Condition.CLOSED, BLOCK) for _ in range(GEOMETRY.zone_count)]
    rules = ZoneRules("device", GEOMETRY, states)
    limit = GEOMETRY.max_active
    assert 0 < limit < GEOMETRY.zone_count
    assert rules.active == limit
    assert condition(rules, limit - 1) is Condition.CLOSED
    assert condition(rules, limit) is Condition.FULL
    rules.finish(0)
    rules.reset([limit])
    append(rules, limit)


@pytest.mark.parametrize(
    ("found", "expected", "bad"),
    [
        (b"", b"", -1),
        (b"aaaabbbb", b"aaaabbbb", -1),
        (b"aaaabbbb", b"aaaabbbc", 1),
        (b"aaaabbbb", b"baaacccc", 0),
    ],
)
def test_first_bad_block(found: bytes, expected: bytes, bad: int) -> None:
    assert first_bad_block(found, expected) == bad


def test_first_bad_block_of_another_length() -> None:
    with pytest.raises(ValueError, match="4 bytes of checksums for 2 blocks"):
        first_bad_block(bytes(8), bytes(4))


def test_a_report_keeps_the_order_in_which_zones_were_opened(rules: ZoneRules) -> None:
    for zone in (3, 1, 0, 2):
        rules.begin_append(zone, 0, BLOCK)
        rules.end_append(zone)
    for report in rules.report():
        rules.adopt(*report[:3])
    rules.begin_append(4, 0, BLOCK)
    assert condition(rules, 3) == Condition.CLOSED
