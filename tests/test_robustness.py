"""What a policy is told may be wrong: the default is not worse for it than what is told nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retainzfs import placement
from retainzfs.errors import UsageError
from retainzfs.evaluation.disturbance import DISTURBANCES, family
from retainzfs.evaluation.measures import Result
from retainzfs.evaluation.robustness import TOLERATED, Verdict, judge
from retainzfs.evaluation.simulator import Simulator
from retainzfs.evaluation.trust import CLEARLY, FEWEST, HINTS, RECENT, Death, Witness, witness
from retainzfs.evaluation.workload import Delete, Save, Workload
from retainzfs.placement.admission import RULES

pytestmark = pytest.mark.pure

CROWDED = {"interleaved": 0.86}  # two generations under way; above it every policy copies all day
EXAMPLES = {"nightly": 100}  # by hypothesis profile

disturbances = pytest.mark.parametrize("name", DISTURBANCES)


# Disturbed workloads


def saved(workload: Workload) -> dict[int, int]:
    """Bytes by generation."""
    sizes: dict[int, int] = {}
    for event in workload.events:
        if isinstance(event, Save):
            sizes[event.generation] = sizes.get(event.generation, 0) + event.size
    return sizes


def peak(workload: Workload) -> int:
    """Bytes that live at most, after the deletions of a moment."""
    sizes, live, most = saved(workload), sum(workload.anchors), 0
    for event, after in zip(workload.events, [*workload.events[1:], None], strict=True):
        if isinstance(event, Save):
            live += event.size
        elif isinstance(event, Delete):
            live -= sizes[event.generation]
        if after is None or after.time > event.time:
            most = max(most, live)
    return most


@disturbances
@pytest.mark.parametrize("base", ["paper", "mixed"])
def test_a_disturbance_bends_what_is_told_and_when_not_what_is_saved(base: str, name: str) -> None:
    plain = family(base).make(1, 0.84)
    bent = family(f"{base}+{name}").make(1, 0.84)
    assert bent.events != plain.events, "undisturbed"
    assert bent == family(f"{base}+{name}").make(1, 0.84), "a seed is one workload"
    assert bent.name == f"{base}+{name}"
    assert saved(bent).items() <= saved(plain).items()
    times = [event.time for event in bent.events]
    assert times == sorted(times)
    assert peak(bent) <= peak(plain)
    born: set[int] = set()
    for event in bent.events:
        if isinstance(event, Save):
            born.add(event.generation)
        else:
            assert event.generation in born, "before it is saved"
    deleted = [event.generation for event in bent.events if isinstance(event, Delete)]
    assert len(set(deleted)) == len(deleted), "deleted twice"


def test_hints_are_wrong_in_the_way_that_is_said() -> None:
    def lateness(name: str) -> list[float]:
        """Of all deletions, after what was hinted when they were saved."""
        events = family(f"paper+{name}").make(0, 0.84).events
        hints = {event.generation: event.hint for event in events if isinstance(event, Save)}
        return [e.time - hints[e.generation] for e in events if isinstance(e, Delete)]

    assert max(lateness("late")) < 0 < min(lateness("early"))
    inverted = lateness("inverted")
    assert min(inverted) < 0 < max(inverted)
    assert -math.inf in lateness("finite-as-anchor")
    assert min(lateness("changed")) < 0 == max(lateness("changed"))


def test_corrected_hints_are_wrong_only_at_the_change() -> None:
    bent = family("paper+changed-corrected").make(0, 0.84)
    hints: dict[int, float] = {}
    wrong = set()
    for event in sorted((*bent.corrections, *bent.events), key=lambda event: event.time):
        if not isinstance(event, Delete):
            hints[event.generation] = event.hint
        elif event.time != hints[event.generation]:
            wrong.add(event.time)
    assert wrong
    assert wrong <= {correction.time for correction in bent.corrections}


def test_disturbances_add_up_and_unknown_ones_are_explained() -> None:
    both = family("small+interleaved+random").make(1, 0.8)
    assert any(isinstance(event, Save) and event.more for event in both.events)
    with pytest.raises(UsageError, match=r"'wrong' of paper; known: random.*burst"):
        family("paper+wrong")
    with pytest.raises(UsageError, match=r"'papers'; known: paper"):
        family("papers+random")


# Whom to believe

lives = st.lists(st.floats(1, 60), min_size=RECENT, max_size=3 * RECENT)


@given(lives=lives, lag=st.floats(-20, 20))
def test_hints_that_are_always_wrong_by_as_much_are_put_right(
    lives: list[float], lag: float
) -> None:
    believed = witness([Death(lag, life) for life in lives])
    assert math.isnan(believed.life), "hints without an error of their own are believed"
    assert believed.retirement(30.0, 0.0, 0.0) == pytest.approx(30.0 + lag)


@given(error=st.floats(0, 30), life=st.floats(1, 60), number=st.integers(RECENT, 3 * RECENT))
def test_a_steady_life_is_believed_when_hints_are_erratic(
    error: float, life: float, number: int
) -> None:
    """Every second hint is early, the others are late by as much."""
    believed = witness([Death(-error if n % 2 else error, life) for n in range(number)])
    if error > CLEARLY:
        assert believed.retirement(100.0, 10.0, 0.0) == 10.0 + life
    else:
        assert believed == HINTS, "no better than hints"


def test_nothing_is_learned_from_few_deaths_or_from_anchors() -> None:
    few = [Death(4.0, 10.0)] * (FEWEST - 1)
    assert witness(few) is HINTS
    assert witness([*few, Death(-math.inf, 10.0)]) is HINTS
    assert witness([*few, Death(4.0, 10.0)]) == Witness(lag=4.0)
    assert witness([*few, Death(0.0, 10.0)]).lag == 0, "one in time: not late as a rule"
    assert Witness(life=3.0).retirement(math.inf, 1.0, 5.0) == math.inf


def test_who_dies_in_time_is_told_by_whom_one_believes() -> None:
    assert HINTS.late(Death(2.0, 30.0)) == 2.0
    assert Witness(lag=-8.0).late(Death(-8.0, 30.0)) == 0.0, "always so early: no surprise"
    assert Witness(life=25.0).late(Death(-100.0, 30.0)) == 5.0


def test_what_is_late_is_expected_to_be_late_by_as_much_again() -> None:
    assert HINTS.retirement(30.0, 0.0, now=30.0) == 30.0
    assert HINTS.retirement(30.0, 0.0, now=34.0) == 38.0
    assert Witness(lag=6.0).retirement(30.0, 0.0, now=34.0) == 36.0


# The default against zenfs


def result(overhead: float, host: float, done: int = 9) -> Result:
    return Result(saves=9, saves_done=done, overhead_zones=overhead, write_amplification=host)


def test_what_a_verdict_compares() -> None:
    fine = Verdict(result(2.0, 1.0), (result(4.0, 1.0), result(1.0, 1.5), result(1.0, 0.5, done=3)))
    assert (fine.overhead, fine.host_bytes, fine.holds) == (0.5, 1.0, True)
    assert not Verdict(result(2.0, 1.1), (result(4.0, 1.0),)).holds
    assert not Verdict(result(4.3, 1.0), (result(4.0, 1.04),)).holds
    gave_up = Verdict(result(2.0, 1.0, done=8), (result(4.0, 1.0),))
    assert gave_up.overhead == math.inf
    assert not gave_up.completed
    assert Verdict(result(2.0, 1.0, done=8), (result(4.0, 1.0, done=8),)).holds


@pytest.mark.parametrize(("name", "seed", "load"), [("paper+late", 300, 0.92), ("mixed", 0, 0.95)])
def test_copies_go_on_in_a_fresh_zone_when_the_one_begun_is_full(
    name: str, seed: int, load: float
) -> None:
    workload = family(name).make(seed, load)
    done = Simulator(workload, placement.policy("plan"), RULES["priced"]()).run()
    assert done.saves_done == done.saves


@disturbances
@settings(
    max_examples=EXAMPLES.get(settings.get_current_profile_name(), 2),
    deadline=None,
    derandomize=True,
    database=None,
)
@given(
    base=st.sampled_from(["paper", "small"]),
    seed=st.integers(100, 10_000),
    load=st.sampled_from([0.92, 0.70, 0.84, 0.76, 0.90, 0.80, 0.88]),
)
def test_the_default_is_never_worse_than_zenfs(
    name: str, base: str, seed: int, load: float
) -> None:
    load = min(load, CROWDED.get(name, load))
    found = judge(family(f"{base}+{name}").make(seed, load))
    assert found.completed, f"{found.default.saves_done} saves"
    assert found.host_bytes <= TOLERATED, f"{found.host_bytes:.3f} of zenfs's host bytes"
    assert found.overhead <= TOLERATED, f"{found.overhead:.3f} of zenfs's overhead"
