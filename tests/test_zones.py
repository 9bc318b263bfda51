"""The zone table: every index against a count over all zones, and the ledger of active zones."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from retainzfs.errors import NoSpace
from retainzfs.placement import to_finish
from retainzfs.zone import GAIN_LEAST, Kind, State, Totals, Zone, summary
from retainzfs.zones import ZoneTable, slot_limits

pytestmark = pytest.mark.pure

BLOCK = 4096
CAPACITY = 8 * BLOCK
DATA = [kind for kind in Kind if kind not in (Kind.METADATA, Kind.COLLECTION)]
KINDS = st.sampled_from([*DATA, Kind.COLLECTION])
GIDS = st.integers(0, 5)
PICK = st.integers(0, 1000)


def make(count: int = 12, active: int = 9, opened: int = 4) -> ZoneTable:
    return ZoneTable(CAPACITY, count, active, opened, metadata=(0, 3))


def filled(table: ZoneTable, kind: Kind, blocks: int, gid: int = 1) -> Zone:
    """A fresh zone with `blocks` written and live."""
    zone = table.acquire(kind)
    assert zone is not None
    table.reserve(zone, blocks * BLOCK)
    table.add_live(zone, gid, blocks * BLOCK)
    table.written(zone, blocks * BLOCK)
    return zone


class Machine(RuleBasedStateMachine):
    """Random operations of a well-behaved caller on a small device."""

    def __init__(self) -> None:
        super().__init__()
        self.table = make()
        self.sequence = 0
        self.durable = 0

    def some(self, pick: int, zones: list[Zone]) -> Zone | None:
        return zones[pick % len(zones)] if zones else None

    def data(self) -> list[Zone]:
        return [zone for zone in self.table.zones if zone.kind is not Kind.METADATA]

    def promised(self, zone: Zone) -> int:
        """Promises that nobody owns: only these may be cancelled."""
        return min(zone.reserved, zone.write_pointer + zone.reserved - zone.live_bytes)

    @rule(kind=KINDS, blocks=st.integers(1, 8), gid=GIDS, ours=st.booleans())
    def start_zone(self, kind: Kind, blocks: int, gid: int, ours: bool) -> None:
        kept = 0 if kind is Kind.COLLECTION else 1
        lowest = [zone.index for zone in self.data() if zone.state is State.EMPTY]
        try:
            zone = self.table.acquire(kind)
        except NoSpace:
            assert len(lowest) <= kept, "no space, and yet there is an empty zone"
            return
        assert len(lowest) > kept, "the emergency zone was given away"
        if zone is None:
            self.make_room(kind)
            return
        assert zone.index == lowest[0]
        if kind is not Kind.FINITE:
            assert not self.table.partial(kind), "a second zone while the first takes bytes"
        assert zone.kind is self.table.group(kind)
        self.table.reserve(zone, blocks * BLOCK)
        if ours:
            self.table.add_live(zone, gid, blocks * BLOCK)

    def make_room(self, kind: Kind) -> None:
        """A refusal always has a way out: a zone to finish, or one whose slot is coming back."""
        zone = to_finish(self.table, kind, float, 0.0)
        if zone is None:
            coming = [z for z in self.table.zones if z.active and not z.tail]
            assert coming, "refused, with nothing to finish and nothing to wait for"
            return
        assert zone.active
        self.table.seal(zone)
        self.drained(zone)

    @rule(pick=PICK, part=st.integers(1, 8), gid=GIDS)
    def promise(self, pick: int, part: int, gid: int) -> None:
        zone = self.some(pick, [z for z in self.data() if z.tail])
        if zone is not None:
            nbytes = min(part * BLOCK, zone.tail)
            self.table.reserve(zone, nbytes)
            self.table.add_live(zone, gid, nbytes)

    @rule(pick=PICK, part=st.integers(1, 8))
    def write(self, pick: int, part: int) -> None:
        zone = self.some(pick, [z for z in self.data() if z.reserved])
        if zone is not None and self.table.open(zone):
            self.table.written(zone, min(part * BLOCK, zone.reserved))
            self.drained(zone)

    def drained(self, zone: Zone) -> None:
        if zone.sealed and not zone.reserved and zone.active:
            self.table.finish(zone)

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        zone = self.some(pick, [z for z in self.data() if self.promised(z) > 0])
        if zone is not None:
            self.table.cancel(zone, self.promised(zone))
            if zone.active and zone.idle and not zone.write_pointer:
                self.table.release(zone)
            self.drained(zone)

    @rule(pick=PICK, part=st.integers(1, 8), to=GIDS, move=st.booleans())
    def free(self, pick: int, part: int, to: int, move: bool) -> None:
        zone = self.some(pick, [z for z in self.table.zones if z.live])
        if zone is None:
            return
        gid = sorted(zone.live)[pick % len(zone.live)]
        nbytes = min(part * BLOCK, zone.live[gid])
        if move:
            self.table.move_live(zone, gid, to, nbytes)
        else:
            self.sequence += 1
            self.table.drop_live(zone, gid, nbytes, self.sequence)

    @rule()
    def commit(self) -> None:
        self.durable = self.sequence

    @rule(pick=PICK)
    def read(self, pick: int) -> None:
        zone = self.some(pick, self.data())
        if zone is not None and zone.pins:
            self.table.unpin(zone)
        elif zone is not None:
            self.table.pin(zone)

    @rule()
    def idle(self) -> None:
        zone = self.table.coldest_open()
        if zone is not None:
            assert zone.state is State.OPEN
            assert not zone.reserved
            self.table.close(zone)

    @rule()
    def reset(self) -> None:
        for zone in self.table.resettable(self.durable):
            assert not zone.live
            epoch = zone.epoch
            self.table.seal(zone)
            assert zone not in self.table.resettable(self.durable), "offered during its reset"
            self.table.reset(zone)
            assert zone.epoch == epoch + 1

    @precondition(lambda self: sum(z.state in (0xD, 0xF) for z in self.table.zones) < 2)
    @rule(pick=PICK, state=st.sampled_from([State.READ_ONLY, State.OFFLINE]))
    def break_zone(self, pick: int, state: State) -> None:
        zone = self.some(pick, [z for z in self.data() if not z.reserved])
        if zone is not None:
            self.table.observe(zone, state, zone.write_pointer)

    @invariant()
    def totals_follow(self) -> None:
        totals, zones = self.table.totals, self.data()
        assert sum(totals) == CAPACITY * len(zones)
        assert min(totals) >= 0
        assert totals == Totals(*map(sum, zip(*(zone.totals() for zone in zones), strict=True)))
        assert totals.free == CAPACITY * self.table.empty
        assert totals.live == sum(sum(zone.live.values()) for zone in zones)
        assert totals.tail == sum(zone.tail for zone in zones)
        lost = [z for z in zones if z.state in (State.READ_ONLY, State.OFFLINE)]
        assert totals.lost == sum(CAPACITY - zone.live_bytes for zone in lost)
        whole = [z for z in zones if z not in lost]
        written = sum(min(z.live_bytes, z.write_pointer) for z in whole) + totals.dead
        assert written == sum(z.write_pointer for z in whole)

    @invariant()
    def live_follows(self) -> None:
        for zone in self.table.zones:
            assert zone.live_bytes == sum(zone.live.values())
            assert all(nbytes > 0 for nbytes in zone.live.values())

    @invariant()
    def ledger_holds(self) -> None:
        table = self.table
        active = [zone for zone in self.data() if zone.active]
        data = [zone for zone in active if zone.kind is not Kind.COLLECTION]
        assert table.active_data() == len(data) <= table.data_active_limit
        assert len(active) - len(data) <= 1
        opened = [zone for zone in data if zone.state is State.OPEN]
        assert table.open_data() == len(opened) <= table.data_open_limit
        for kind in DATA:
            mine = [zone for zone in active if zone.kind is table.group(kind)]
            assert table.active(kind) == mine

    @invariant()
    def loose_and_states_follow(self) -> None:
        zones = self.data()
        assert self.table.states() == Counter(zone.state for zone in zones)
        assert self.table.awaited() == any(zone.dead and zone.pins for zone in zones)
        full = [zone for zone in zones if zone.state is State.FULL and zone.live_bytes]
        active = [zone for zone in zones if zone.active and zone.kind is not Kind.COLLECTION]
        loose = [zone for zone in full if zone.gain >= GAIN_LEAST] + active
        assert self.table.loose() == sorted(loose, key=lambda zone: zone.index)

    @invariant()
    def resettable_follows(self) -> None:
        expected = [
            zone
            for zone in self.data()
            if (zone.state is State.FULL or (zone.active and zone.write_pointer))
            and not (zone.live or zone.reserved or zone.pins or zone.sealed)
            and zone.freed_at <= self.durable
        ]
        assert self.table.resettable(self.durable) == expected


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def test_metadata_zones_are_in_no_total() -> None:
    table = make()
    assert table.totals == Totals(free=10 * CAPACITY)
    assert (table.empty, table.empty_available) == (10, 9)
    with pytest.raises(AssertionError, match="journal"):
        table.observe(table[0], State.FULL, CAPACITY)


def test_lowest_empty_zone_first_also_after_a_reset() -> None:
    table = make()
    first, second = filled(table, Kind.FINITE, 8), filled(table, Kind.FINITE, 8)
    assert (first.index, second.index) == (1, 2)
    assert first.state is State.FULL
    table.drop_live(first, 1, BLOCK, 7)
    table.drop_live(first, 1, CAPACITY - BLOCK, 5)
    assert table.resettable(6) == []
    assert table.resettable(7) == [first]
    table.reset(first)
    assert (first.epoch, first.freed_at, first.write_pointer) == (1, 0, 0)
    assert filled(table, Kind.ANCHOR, 1) is first


def test_limits_leave_the_journal_and_collection_their_share() -> None:
    table = make(active=14, opened=8)
    assert (table.data_active_limit, table.data_open_limit) == (11, 6)
    unlimited = make(active=0, opened=0)
    assert (unlimited.data_active_limit, unlimited.data_open_limit) == (29, 30)


@pytest.mark.parametrize(("slots", "finite"), [(3, 1), (4, 1), (5, 2), (6, 3), (9, 6), (10, 5)])
def test_finite_gets_what_the_others_leave(slots: int, finite: int) -> None:
    limits = slot_limits(slots)
    groups = set(limits.groups.values())
    assert limits.share(Kind.FINITE) == finite
    assert sum(limits.share(group) for group in groups) == slots
    assert [k for k, g in limits.groups.items() if g is Kind.FINITE] == [Kind.FINITE]
    assert [k for k, g in limits.groups.items() if g is Kind.ANCHOR] == [Kind.ANCHOR]
    assert (limits.groups[Kind.SCRATCH] is limits.groups[Kind.CACHE]) == (slots < 10)
    assert (limits.groups[Kind.OUTPUT] is limits.groups[Kind.UNHINTED]) == (slots < 10)


def test_finite_gives_back_what_it_borrowed() -> None:
    table = make(count=20)
    zones = [filled(table, Kind.FINITE, 8 - blocks, gid=blocks) for blocks in range(1, 7)]
    assert table.slots(Kind.FINITE) == 0
    assert table.crowded_by(Kind.FINITE) is Kind.FINITE
    for kind in (Kind.ANCHOR, Kind.CACHE, Kind.OUTPUT):
        assert table.slots(kind) == 1
        assert table.acquire(kind) is None
        assert table.crowded_by(kind) is Kind.FINITE
        loser = to_finish(table, kind, float, 0.0)
        assert loser is zones.pop(0), "the zone with the least tail and time to live loses"
        table.finish(loser)
        filled(table, kind, 1)
    assert table.slots(Kind.SCRATCH) == 0
    assert table.crowded_by(Kind.SCRATCH) is Kind.CACHE
    assert table.crowded_by(Kind.FINITE) is Kind.FINITE, "its share is used up"
    assert len(table.partial(Kind.FINITE)) == 3


def test_a_dead_zone_gives_its_slot_for_nothing() -> None:
    table = make()
    zones = [filled(table, Kind.FINITE, 4, gid) for gid in range(6)]
    assert table.acquire(Kind.FINITE) is None
    table.drop_live(zones[4], 4, 4 * BLOCK, 1)
    assert zones[4] not in table.partial(Kind.FINITE)
    assert table.slots(Kind.FINITE) == 1
    assert to_finish(table, Kind.FINITE, float, 0.0) is zones[4]
    table.finish(zones[4])
    assert table.acquire(Kind.FINITE) is not None


def test_collection_has_a_ledger_of_its_own() -> None:
    table = make()
    for _ in range(6):
        filled(table, Kind.FINITE, 4)
    zone = filled(table, Kind.COLLECTION, 4)
    assert table.acquire(Kind.COLLECTION) is None
    assert to_finish(table, Kind.COLLECTION, float, 0.0) is zone
    table.drop_live(zone, 1, 4 * BLOCK, 1)
    assert table.spare(Kind.FINITE) is None
    assert to_finish(table, Kind.COLLECTION, float, 0.0) is zone


def test_the_last_empty_zone_is_for_collection() -> None:
    table = make(count=4)
    filled(table, Kind.FINITE, 8)
    with pytest.raises(NoSpace):
        table.acquire(Kind.FINITE)
    assert table.acquire(Kind.COLLECTION) is table[2]
    with pytest.raises(NoSpace):
        table.acquire(Kind.COLLECTION)


def test_a_sealed_zone_promises_nothing_and_keeps_its_promises() -> None:
    table = make()
    zone = filled(table, Kind.FINITE, 2)
    table.reserve(zone, BLOCK)
    table.seal(zone)
    assert (zone.tail, table.partial(Kind.FINITE), table.slots(Kind.FINITE)) == (0, [], 6)
    table.written(zone, BLOCK)
    table.finish(zone)
    assert table.totals.stranded == 5 * BLOCK


def test_a_zone_finished_before_any_write_can_be_reset() -> None:
    table = make()
    zone = table.acquire(Kind.FINITE)
    assert zone is not None
    table.finish(zone)
    assert table.resettable(0) == [zone]


def test_a_zone_full_of_promises_waits_for_its_writes() -> None:
    table = make()
    zone = table.acquire(Kind.CACHE)
    assert zone is not None
    table.reserve(zone, CAPACITY)
    assert (zone.tail, table.slots(Kind.CACHE), table.crowded_by(Kind.CACHE)) == (0, 1, None)
    assert table.resettable(99) == []
    table.written(zone, CAPACITY)
    assert zone.state is State.FULL
    assert table.resettable(0) == [zone], "written and nobody's"


def test_promises_are_exact() -> None:
    table = make()
    zone = filled(table, Kind.FINITE, 3)
    with pytest.raises(AssertionError, match="promised"):
        table.reserve(zone, 6 * BLOCK)
    table.reserve(zone, 5 * BLOCK)
    with pytest.raises(AssertionError, match="promised"):
        table.reserve(zone, BLOCK)
    with pytest.raises(AssertionError, match="FULL"):
        table.finish(zone)


def test_live_bytes_cannot_exceed_what_was_promised() -> None:
    table = make()
    zone = filled(table, Kind.FINITE, 3)
    with pytest.raises(AssertionError, match="more live bytes"):
        table.add_live(zone, 2, BLOCK)
    with pytest.raises(AssertionError, match="too few live bytes"):
        make().drop_live(filled(table, Kind.ANCHOR, 1), 9, BLOCK, 1)


def test_a_reset_needs_a_dead_zone_without_readers() -> None:
    table = make()
    zone = filled(table, Kind.FINITE, 3)
    with pytest.raises(AssertionError, match="live"):
        table.reset(zone)
    table.drop_live(zone, 1, 3 * BLOCK, 1)
    table.pin(zone)
    assert table.resettable(1) == []
    with pytest.raises(AssertionError, match="being read"):
        table.reset(zone)
    table.unpin(zone)
    assert table.resettable(1) == [zone]
    with pytest.raises(AssertionError, match="unpinned"):
        table.unpin(zone)


def test_open_slots_are_held_only_while_needed() -> None:
    table = make(opened=4)
    zones = [filled(table, Kind.FINITE, 1) for _ in range(3)]
    assert [table.open(zone) for zone in zones] == [True, True, False]
    table.reserve(zones[0], BLOCK)
    assert table.coldest_open() is zones[1]
    table.close(zones[1])
    assert table.open(zones[2])
    collecting = filled(table, Kind.COLLECTION, 1)
    assert table.open(collecting), "collection has an open slot of its own"


def test_mount_rebuilds_from_the_device_and_the_extents() -> None:
    table = make()
    table.restore(table[5], Kind.SCRATCH, epoch=4)
    table.observe(table[5], State.CLOSED, 5 * BLOCK)
    table.add_live(table[5], 0, 2 * BLOCK)
    table.observe(table[6], State.OFFLINE, 0)
    assert table[5].kind is Kind.CACHE
    assert table.partial(Kind.SCRATCH) == [table[5]]
    assert table.totals == Totals(
        free=8 * CAPACITY, tail=3 * BLOCK, live=2 * BLOCK, dead=3 * BLOCK, lost=CAPACITY
    )


def test_summary_counts_the_overdue_as_about_to_go() -> None:
    table = make()
    zone = filled(table, Kind.FINITE, 2, gid=3)
    table.reserve(zone, BLOCK)
    table.add_live(zone, 9, BLOCK)
    seen = summary(zone, float, now=4.0, unit=0.5)
    assert (seen.tail, seen.written) == (5 * BLOCK, 3 * BLOCK)
    assert (seen.retire_min, seen.retire_max) == (4.5, 9.0)


def test_summary_of_promises_that_are_nobodys_yet() -> None:
    table = make()
    zone = table.acquire(Kind.FINITE)
    assert zone is not None
    table.reserve(zone, BLOCK)
    seen = summary(zone, float, now=4.0)
    assert (seen.retire_min, seen.retire_max) == (5.0, 5.0)


def test_a_zone_that_fills_up_has_its_slot_until_it_is_full() -> None:
    """What is promised and not yet written is active all the same: collection has to wait."""
    table = make(active=6)
    total = table.limits.total
    for _ in range(total):
        zone = table.acquire(Kind.FINITE)
        assert zone is not None
        table.reserve(zone, CAPACITY)
    copies = filled(table, Kind.COLLECTION, 4)
    assert table.slots(Kind.FINITE) == total, "they come back by themselves"
    assert not table.has_slot(Kind.FINITE)
    with pytest.raises(AssertionError, match="beyond the limit"):
        table.adopt(copies, Kind.FINITE)
    table.written(table.active(Kind.FINITE)[0], CAPACITY)
    assert table.has_slot(Kind.FINITE)
    table.adopt(copies, Kind.FINITE)
    assert table.active_data() == total
