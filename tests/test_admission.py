"""When a generation may be placed as things are, and what collection moves, and where to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs.placement import Arrival, Request, View, ZoneSummary, collection, policy
from retainzfs.placement.admission import RULES, Common, Fixed, Priced, Room, fresh
from retainzfs.placement.collection import Piece, Victim
from retainzfs.placement.plan import TAIL_WORTH, Market

pytestmark = pytest.mark.pure

BLOCK = 4096
CAPACITY = 64 * BLOCK
NOW = 10.0
PLAN = policy("plan")


def partial(index: int, tail: int, retire: float) -> ZoneSummary:
    return ZoneSummary(index, tail * BLOCK, CAPACITY - tail * BLOCK, retire, retire)


def view(*zones: ZoneSummary, empties: int) -> View:
    return View(CAPACITY, NOW, zones, empties, 3)


ONE_AND_A_HALF = Request(CAPACITY * 3 // 2, 20.0)


@pytest.mark.parametrize("name", RULES)
def test_what_fits_is_placed(name: str) -> None:
    plan = RULES[name]().first(PLAN, ONE_AND_A_HALF, view(empties=2), Room())
    assert plan is not None
    assert (fresh(plan), plan.unplaced) == (2, 0)


def test_the_reserve_is_lent_by_rule() -> None:
    """One empty zone of two, and the reserve."""
    seen = view(empties=1)
    assert Fixed().first(PLAN, ONE_AND_A_HALF, seen, Room()) is None
    assert Fixed().last(PLAN, ONE_AND_A_HALF, seen, Room()) is None
    borrowed = Common().first(PLAN, ONE_AND_A_HALF, seen, Room())
    assert borrowed is not None
    assert fresh(borrowed) == 2
    assert Common().first(PLAN, ONE_AND_A_HALF, seen, Room(reserve=0)) is None
    assert Common().first(PLAN, Request(3 * CAPACITY, 20.0), seen, Room()) is None, "too much"

    assert Priced().first(PLAN, ONE_AND_A_HALF, seen, Room()) is None, "copying comes first"
    repaid = Priced().first(PLAN, ONE_AND_A_HALF, seen, Room(repaid=True))
    assert repaid is not None, "the deletions give it back"
    assert Priced().first(PLAN, ONE_AND_A_HALF, seen, Room(reserve=0, repaid=True)) is None
    assert Priced().last(PLAN, ONE_AND_A_HALF, seen, Room()) is None, "nothing would replace it"
    last = Priced().last(PLAN, ONE_AND_A_HALF, seen, Room(repaid=True))
    assert last is not None
    assert fresh(last) == 2


@pytest.mark.parametrize(("lifetime", "admitted"), [(10.0, True), (10.5, False)])
def test_doing_without_a_fresh_zone_has_its_price(lifetime: float, admitted: bool) -> None:
    """Bytes that die next cost a fresh zone for 1 E. The only tail is worth 40/64 of a zone for the
    lifetime of the next save: up to 8 E more are paid, which is 10.1 E of lifetime."""
    arrivals = [Arrival(11.0, lifetime, CAPACITY, 4.0)]
    seen = replace(view(partial(3, 40, 40.0), empties=0), arrivals=arrivals)
    request = Request(40 * BLOCK, 11.0)
    plan = Priced().first(PLAN, request, seen, Room())
    assert (plan is not None) is admitted
    assert Priced().last(PLAN, request, seen, Room()) is not None


@given(
    size=st.integers(1, 4 * CAPACITY),
    tails=st.lists(st.tuples(st.integers(1, 63), st.integers(11, 40)), max_size=5),
    empties=st.integers(0, 3),
    reserve=st.integers(0, 1),
    repaid=st.booleans(),
    name=st.sampled_from(sorted(RULES)),
)
def test_no_rule_lends_more_than_the_reserve(
    size: int,
    tails: list[tuple[int, int]],
    empties: int,
    reserve: int,
    repaid: bool,
    name: str,
) -> None:
    zones = [partial(i, tail, float(retire)) for i, (tail, retire) in enumerate(tails)]
    room = Room(reserve, repaid)
    lent = {"fixed": 0, "common": reserve, "priced": reserve if repaid else 0}[name]
    for ask in (RULES[name]().first, RULES[name]().last):
        plan = ask(PLAN, Request(size, 25.0), view(*zones, empties=empties), room)
        if plan is not None:
            assert not plan.unplaced
            assert sum(step.nbytes for step in plan.steps) == -(-size // BLOCK) * BLOCK
            assert fresh(plan) <= empties + lent


# Collection


def victim(zone: int, live: int, retire: float, tail: int = 0) -> Victim:
    return Victim(zone, CAPACITY, live * BLOCK, retire, tail * BLOCK)


def test_victims_are_those_that_stay_long_with_little_in_them() -> None:
    mostly_dead, soon, full = victim(1, 8, 40.0), victim(2, 4, 11.0), victim(3, 60, 40.0)
    ranked = collection.ranked([full, soon, mostly_dead], NOW, 1.0)
    assert [v.zone for v in ranked] == [1, 2, 3]
    greedy = collection.ranked([full, soon, mostly_dead], NOW, 1.0, collection.greedy)
    assert [v.zone for v in greedy] == [2, 1, 3]
    alike = collection.ranked([victim(2, 8, 40.0), mostly_dead], NOW, 1.0)
    assert [v.zone for v in alike] == [1, 2], "ties to the lowest"
    forever = collection.ranked([victim(1, 8, math.inf), victim(2, 8, 12.0)], NOW, 1.0)
    assert forever[0].zone == 1


def test_pieces_go_where_they_hold_up_nothing() -> None:
    piece = Piece(1, 8 * BLOCK, 20.0)
    tails = [partial(1, 30, 12.0), partial(2, 30, 25.0), partial(3, 4, 30.0)]
    into = collection.destination(piece, piece.size, tails, CAPACITY, 1.0)
    assert into is tails[1], "zone 1 would wait for it, and zone 3 would cut it in two"
    assert collection.destination(piece, piece.size, [], CAPACITY, 1.0) is None


def test_anchors_are_copied_to_no_zone_that_ends() -> None:
    piece = Piece(1, 8 * BLOCK, math.inf)
    ends, stays = partial(1, 30, 40.0), partial(2, 30, math.inf)
    assert collection.destination(piece, piece.size, [ends], CAPACITY, 1.0) is None
    assert collection.destination(piece, piece.size, [ends, stays], CAPACITY, 1.0) is stays
    mixed = collection.destination(piece, piece.size, [ends], CAPACITY, 1.0, apart=False)
    assert mixed is ends, "for a policy that does not keep them apart"


def test_what_compaction_gains_by_hand() -> None:
    """16 blocks that stay for 20 E keep a zone of 64: moved to one that stays as long, 64 * 20 are
    won with 16 copied, less what the tails are worth."""
    idle = Market(CAPACITY, NOW, [])
    half = victim(1, 16, 30.0)
    gain = collection.gain(half, partial(2, 32, 30.0), idle)
    assert gain == pytest.approx(64 * 20 / 16)
    assert collection.gain(half, partial(2, 8, 30.0), idle) == -math.inf, "no room"
    held_up = collection.gain(half, partial(2, 32, 20.0), idle)
    assert held_up == pytest.approx(64 * (20 - 10) / 16)
    busy = Market(CAPACITY, NOW, [Arrival(12.0, 8.0, CAPACITY, 4.0)])
    half_full = collection.gain(half, partial(2, 32, 30.0), busy)
    assert half_full == pytest.approx(gain - TAIL_WORTH * (32 - 16) * 8 / 16)
    fresh_zone = collection.gain(half, None, busy)
    assert fresh_zone == pytest.approx(TAIL_WORTH * 48 * 8 / 16), "48 blocks can be used again"
    assert collection.gain(victim(1, 16, 30.0, tail=48), None, busy) == 0.0, "nothing dead in it"


def test_the_best_move_is_made_and_none_that_gains_little() -> None:
    idle = Market(CAPACITY, NOW, [])
    into = partial(9, 40, 40.0)
    dear, cheap = victim(1, 32, 40.0), victim(2, 4, 40.0)
    assert collection.idle_move([(dear, [into]), (cheap, [into])], idle, 1.0) == (cheap, 9)
    half, more = victim(3, 32, 999.0), victim(3, 33, 999.0)
    assert collection.idle_move([(half, [into])], idle, 1.0) == (half, 9)
    assert collection.idle_move([(more, [into])], idle, 1.0) is None, "alive"
    assert collection.idle_move([(victim(3, 4, math.inf), [into])], idle, 1.0) is None, "an anchor"
    assert collection.idle_move([(victim(4, 16, 12.0), [into])], idle, 1.0) is None, "soon free"
    assert collection.idle_move([], idle, 1.0) is None


@given(
    size=st.integers(1, 4 * CAPACITY),
    tails=st.lists(st.tuples(st.integers(1, 63), st.integers(11, 40)), max_size=5),
)
def test_tails_take_what_they_hold_and_no_more(size: int, tails: list[tuple[int, int]]) -> None:
    seen = {i: partial(i, tail, float(retire)) for i, (tail, retire) in enumerate(tails)}
    room = {index: zone.tail for index, zone in seen.items()}
    taken = list(collection.into_tails(Piece(1, size, 25.0), seen, CAPACITY, 1.0))
    assert sum(nbytes for _, nbytes in taken) == min(size, sum(room.values()))
    for index, nbytes in taken:
        room[index] -= nbytes
    assert room == {index: zone.tail for index, zone in seen.items()}, "what is left of them"


def test_a_tail_that_follows_anchors_goes_to_what_lives_longest() -> None:
    """It is free, so the question is only who saves most by it."""
    arrivals = [Arrival(11.0, 28.0, CAPACITY, 4.0), Arrival(12.0, 8.0, CAPACITY, 4.0)]
    seen = replace(view(partial(1, 32, math.inf), empties=9), arrivals=arrivals)
    short = PLAN.plan(Request(32 * BLOCK, NOW + 8.0), seen)
    long = PLAN.plan(Request(32 * BLOCK, NOW + 28.0), seen)
    assert [step.zone for step in short.steps] == [None]
    assert [step.zone for step in long.steps] == [1]
