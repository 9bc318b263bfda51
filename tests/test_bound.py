"""The offline bound: it encloses the optimum, which is enumerated where the instance is tiny."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from bound_run import show
from hypothesis import given, settings
from hypothesis import strategies as st

from retainzfs.errors import UsageError
from retainzfs.evaluation import bound
from retainzfs.evaluation.offline import (
    Generation,
    Instance,
    Piece,
    alone,
    instance,
    search,
    zone_time,
)
from retainzfs.evaluation.workload import FAMILIES, Delete, Save

pytest.importorskip("highspy", reason="needs highspy: scripts/setup-environment test")

pytestmark = pytest.mark.pure

CAPACITY = 3
MANY = 99


def case(*generations: tuple[float, float, int], zones: int = MANY, active: int = MANY) -> Instance:
    made = tuple(Generation(*g, stream=number) for number, g in enumerate(generations))
    return Instance(CAPACITY, zones, active, made)


def isolated(given: Instance) -> list[Piece]:
    """Every generation in zones of its own."""
    pieces: list[Piece] = []
    for number, generation in enumerate(given.generations):
        left = generation.size
        while left:
            size = min(left, given.capacity)
            pieces.append(Piece(number, len(pieces), size))
            left -= size
    return pieces


@st.composite
def cases(draw: st.DrawFn, active: st.SearchStrategy[int]) -> Instance:
    times = sorted(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    lives = [draw(st.integers(1, 6)) for _ in times]
    sizes = [draw(st.integers(1, 4)) for _ in times]
    rows = [(float(t), float(t + n), size) for t, n, size in zip(times, lives, sizes, strict=True)]
    return case(*rows, active=draw(active))


def splits(size: int, tails: Sequence[int], fresh: int = CAPACITY) -> Iterator[list[int]]:
    """Every way to put bytes into tails, and then into fresh zones from the fullest on."""
    if tails:
        for part in range(min(size, tails[0]) + 1):
            for rest in splits(size - part, tails[1:]):
                yield [part, *rest]
    elif not size:
        yield []
    else:
        for part in range(1, min(size, fresh) + 1):
            for rest in splits(size - part, (), part):
                yield [part, *rest]


def placements(given: Instance, flows: list[dict[int, int]]) -> Iterator[list[Piece]]:
    """Every placement; `flows`: bytes by generation, for each zone so far."""
    number = max((k for flow in flows for k in flow), default=-1) + 1
    if number == len(given.generations):
        yield bound.in_order(given.capacity, flows)
        return
    tails = [given.capacity - sum(flow.values()) for flow in flows]
    for parts in splits(given.generations[number].size, tails):
        longer = [*flows, *({} for _ in parts[len(flows) :])]
        yield from placements(
            given,
            [
                {**flow, number: part} if part else flow
                for flow, part in zip(longer, parts, strict=True)
            ],
        )


def optimum(given: Instance) -> float:
    best = math.inf
    for placement in placements(given, []):
        try:
            best = min(best, zone_time(given, placement))
        except ValueError:
            continue
    return best


@settings(max_examples=20, deadline=None)
@given(made=cases(st.just(MANY)))
def test_the_bound_is_the_optimum_where_the_solver_has_time(made: Instance) -> None:
    found = bound.bound(made, isolated(made))
    best = optimum(made)
    assert found.least == pytest.approx(best)
    assert found.zone_time == pytest.approx(best)
    assert zone_time(made, found.placement) == found.zone_time


@settings(max_examples=15, deadline=None)
@given(made=cases(st.integers(1, 2)))
def test_with_few_active_zones_it_encloses_the_optimum(made: Instance) -> None:
    found = bound.bound(made, isolated(made))
    best = optimum(made)
    assert found.least <= best + 1e-6
    assert best <= found.zone_time <= zone_time(made, isolated(made))
    assert zone_time(made, found.placement) == found.zone_time


@settings(max_examples=15, deadline=None)
@given(made=cases(st.integers(2, 6)), width=st.integers(1, 9))
def test_what_the_search_finds_can_be_carried_out(made: Instance, width: int) -> None:
    assert optimum(made) <= zone_time(made, search(made, width))


def test_without_time_it_is_still_a_bound() -> None:
    made = case((0, 4, 2), (1, 5, 2), (2, 6, 2))
    found = bound.bound(made, isolated(made), 0.0)
    assert made.live_time - 1e-6 <= found.least <= optimum(made) <= found.zone_time


def test_a_case_by_hand() -> None:
    # Two zones hold the six bytes: the first save fills one with half of the second, which the
    # third shares for the rest: [0, 5] and [1, 6]. Alone they would take three zones for 4 each.
    made = case((0, 4, 2), (1, 5, 2), (2, 6, 2))
    assert made.live_time == pytest.approx(8)
    found = bound.bound(made, isolated(made))
    assert found.least == pytest.approx(10)
    assert found.zone_time == 10
    assert made.overhead(found.zone_time) == pytest.approx(2 / 3)
    assert zone_time(made, HELD) == 10


HELD = [Piece(0, 0, 2), Piece(1, 0, 1), Piece(1, 1, 1), Piece(2, 1, 2)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"placement": HELD[:-1]}, "0 bytes of generation 2", id="bytes missing"),
        pytest.param({"placement": [*HELD, Piece(2, 3, 1)]}, "3 bytes of generation 2", id="twice"),
        pytest.param({"placement": [*HELD, Piece(2, 3, 0)]}, "has 0 bytes", id="empty piece"),
        pytest.param(
            {"placement": [Piece(0, 0, 2), Piece(1, 0, 2), Piece(2, 1, 2)]},
            "zone 0 holds 4",
            id="over capacity",
        ),
        pytest.param({"placement": [HELD[1], HELD[0], *HELD[2:]]}, "after a later one", id="order"),
        pytest.param({"active": 0}, "1 zones are active", id="active"),
        pytest.param({"zones": 1}, "2 zones are occupied", id="occupied"),
    ],
)
def test_a_broken_placement_is_refused(change: dict[str, Any], words: str) -> None:
    given = {"placement": HELD, "active": 1, "zones": 2, **change}
    made = case((0, 4, 2), (1, 5, 2), (2, 6, 2), active=given["active"], zones=given["zones"])
    with pytest.raises(ValueError, match=words):
        zone_time(made, given["placement"])


def test_a_zone_that_died_is_not_written_again() -> None:
    with pytest.raises(ValueError, match="zone 0 was dead by 2"):
        zone_time(case((0, 2, 1), (3, 5, 1)), [Piece(0, 0, 1), Piece(1, 0, 1)])


def test_a_zone_counts_until_its_last_byte_dies() -> None:
    made = case((0, 9, 1), (1, 3, 1), (9, 12, 1))
    shared = [Piece(0, 0, 1), Piece(1, 0, 1), Piece(2, 1, 1)]
    assert zone_time(made, shared) == 9 + 3
    # The deletion at 9 comes after the save.
    joined = [Piece(0, 0, 1), Piece(1, 0, 1), Piece(2, 0, 1)]
    assert zone_time(made, joined) == 12


def test_an_instance_leaves_out_anchors_and_ends_when_all_is_dead() -> None:
    workload = alone(FAMILIES["milestones"].make(0, 0.95))
    saves = [event for event in workload.events if isinstance(event, Save)]
    deleted = {
        event.generation: event.time for event in workload.events if isinstance(event, Delete)
    }
    assert deleted == {save.generation: save.hint for save in saves}
    assert [save.generation for save in saves] == list(range(len(saves)))
    assert 0 < len(saves) < 250
    assert workload.end == max(deleted.values())
    lived = sum(save.size * (save.hint - save.time) for save in saves)
    assert instance(workload).live_time == pytest.approx(lived / workload.capacity)


@pytest.mark.parametrize("family", ["paper", "small"])
def test_no_policy_beats_the_best_known(family: str) -> None:
    rows = bound.table([0, 1], 8, 20.0, family=family)
    assert [row.policy for row in rows] == [each.label for each in bound.POLICIES] * 2
    assert [row.seed for row in rows] == sorted([0, 1] * len(bound.POLICIES))
    for row in rows:
        assert 0 < row.certified <= row.best_known + 1e-6
        assert row.best_known <= row.overhead
        assert row.ratio >= 1
    assert any(row.ratio > 1.5 for row in rows), "some policy is far from it"
    assert rows == bound.table([0, 1], 8, 20.0, family=family), "not repeatable"


def test_the_table_has_means_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        bound.Row(seed, policy, overhead + seed, best_known=1.0 + seed, certified=0.5)
        for seed in (0, 1)
        for policy, overhead in (("zenfs", 2.0), ("retainz span=4", 1.0))
    ]
    show(rows)
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["OVERHEAD", "0", "1", "MEAN", "RATIO"],
        ["certified", "0.500", "0.500", "0.500", "0.333"],
        ["best known", "1.000", "2.000", "1.500", "1.000"],
        ["zenfs", "2.000", "3.000", "2.500", "1.667"],
        ["retainz span=4", "1.000", "2.000", "1.500", "1.000"],
    ]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no family 'none'"):
        bound.table([0], family="none")
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(UsageError, match=r"pip install 'retainzfs\[evaluation\]'"):
        bound.table([0])
