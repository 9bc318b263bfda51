"""What a stream teaches: its clock, lifetimes, milestones; and that all of it can be stored."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs import lifetimes, streams
from retainzfs.history import BIRTHS, ENDED_STORED, LIVES, Ended, History
from retainzfs.streams import MISSED_MOST, Stream

pytestmark = pytest.mark.pure

TIMES = st.floats(0.01, 1e6, allow_nan=False)


def history(*births: float) -> History:
    taught = History()
    for generation, epoch in enumerate(births, start=1):
        taught.begin(generation, epoch)
    return taught


def ended(number: int = 1, saves: float = 3.0, *, reaped: bool = False) -> Ended:
    return Ended(number, 0.0, 30.0, 31.0, saves, 3.0, reaped, "keep_last=3")


def taught(*lives: float, keep: int | None = None) -> History:
    """Return the history of a stream of which one generation was deleted between two saves."""
    out = history()
    for number, life in enumerate(lives, start=1):
        out.begin(number, float(number))
        out.end(ended(saves=life), keep, teaches=True)
    return out


# The stream's clock


def test_the_clock_counts_saves() -> None:
    clock = history(0, 10, 20, 30)
    assert clock.cadence_s == 10
    assert clock.saves(10, 30) == 2
    assert clock.saves(10, 35) == 2.5
    assert clock.saves(0, 5) == 0.5


def test_a_pause_is_one_save() -> None:
    clock = history(0, 10, 20, 30, 5000, 5010)
    assert clock.cadence_s == 10
    assert clock.saves(10, 5011) == pytest.approx(4.1)
    assert clock.saves(10, 2515) == pytest.approx(2.5)
    assert history(0, 10, 20).saves(0, 9999) == 3, "the save that is due, and no more"
    assert history(0, 10, 20).saves(0, 60, ahead=True) == 6, "what the cadence promises"


def test_what_is_not_known_yet() -> None:
    assert history().cadence_s is None
    assert history(5).cadence_s is None
    assert math.isnan(history(5).saves(5, 50))
    assert math.isnan(history(0, 10).saves(0, math.inf))


def test_a_save_that_failed_was_none() -> None:
    clock = history(0, 10, 11, 20)
    clock.fail(3)
    assert clock.saves(0, 20) == 2
    clock.begin(3, 11)
    assert clock.saves(0, 20) == 3
    clock.begin(3, 11)
    assert clock.saves(0, 20) == 3, "a save begins once"


@given(st.lists(TIMES, min_size=2, max_size=2 * BIRTHS), st.data())
def test_the_clock_never_goes_back(gaps: list[float], data: st.DataObject) -> None:
    epochs = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    clock = history(*epochs)
    first, *rest = sorted(data.draw(st.lists(TIMES, min_size=3, max_size=9)))
    positions = [clock.saves(first, epoch) for epoch in rest]
    assert positions == sorted(positions)
    kept = epochs[-BIRTHS:]
    assert clock.saves(kept[0], kept[-1]) == pytest.approx(len(kept) - 1)


# Lifetimes


def test_one_deletion_may_be_anything() -> None:
    assert taught(3.1).life(None) is None
    assert taught(3.1, 3.0).life(None) == pytest.approx(3.05)


def test_lifetimes_that_are_all_over_teach_nothing() -> None:
    assert taught(1, 9, 4, 14, 2, 8).life(None) is None
    assert taught(3, 3, 3, 9, 3, 3).life(None) == 3, "a milestone that was cleaned up"


def test_a_program_that_flips_is_met_in_the_middle() -> None:
    flipping = taught(3.05, 4.0, 4.0, 3.05, 3.05, 4.0)
    assert flipping.life(None) == pytest.approx(3.525)


def test_a_lag_belongs_to_its_k() -> None:
    late = taught(4.0, 4.0, keep=3)
    assert late.life(3) == 4
    assert late.life(10) == 11, "a new K holds at once"
    assert late.life(None) is None, "what was stated says nothing of a stream without a policy"
    assert taught(4.0, 4.0).life(3) is None


def test_old_lifetimes_are_forgotten() -> None:
    changed = taught(*[2.0] * LIVES, *[5.0] * LIVES)
    assert changed.life(None) == 5


def test_a_clean_up_teaches_little() -> None:
    stream = history(0, 10, 20, 30, 40, 50)
    for number in range(1, 6):
        stream.end(ended(number, 6.0 - number), None, teaches=True)
    assert len(stream.lives) == 2
    assert len(stream.ended) == 5


@pytest.mark.parametrize(
    ("deleted", "kept", "every"),
    [
        pytest.param((10, 20, 40, 50), (30, 60), 30, id="Megatron"),
        pytest.param((10, 20, 40, 50), (30,), None, id="one may be anything"),
        pytest.param((10, 20, 30), (40, 70), None, id="what was kept has the step of all"),
        pytest.param((1, 2, 4, 60), (30, 90), None, id="a multiple was deleted"),
        pytest.param((), (30, 60), None, id="nothing was deleted"),
    ],
)
def test_milestones_show(deleted: tuple[int, ...], kept: tuple[int, ...], every: object) -> None:
    stream = history()
    for number in deleted:
        stream.end(ended(number), None, teaches=True)
    assert stream.every(kept) == every


def test_what_we_delete_shows_no_milestones() -> None:
    stream = history()
    stream.end(ended(10, reaped=True), None, teaches=False)
    assert stream.every((30, 60)) is None


# From lifetimes to retirements


@pytest.mark.parametrize(
    ("keep", "life", "saves", "why"),
    [
        (3, None, 3, "keep_last=3, "),
        (3, 3.4, 3, "keep_last=3, "),
        (3, 4.0, 4, "keep_last=3, but deleted 1.0 saves later"),
        (3, 2.0, 2, "keep_last=3, but deleted 1.0 saves earlier"),
        (None, 3.05, 3.05, "history: deleted after 3.0 saves"),
    ],
)
def test_history_corrects(keep: int | None, life: float | None, saves: float, why: str) -> None:
    learned = lifetimes.Learned(10.0, life)
    hint = lifetimes.retirement(100.0, learned, lifetimes.Policy(keep_last=keep), 7)
    assert hint.retire == pytest.approx(100 + 10 * saves)
    assert hint.origin.startswith(why)


def test_a_learned_milestone_gives_way_to_what_is_stated() -> None:
    learned = lifetimes.Learned(10.0, 1.0, every=30)
    assert lifetimes.retirement(0.0, learned, lifetimes.Policy(), 60).retire == math.inf
    assert lifetimes.retirement(0.0, learned, lifetimes.Policy(), 50).retire == 10
    for stated in (lifetimes.Policy(anchor=False), lifetimes.Policy(keep_every=50)):
        assert lifetimes.retirement(0.0, learned, stated, 60).retire == 10


# Storing


def streams_of(rng: random.Random) -> list[Stream]:
    stream = Stream(5, {b"step-", bytes(range(256))}, history=history())
    for generation in range(1, 3 * BIRTHS):
        stream.history.begin(generation, generation * 10 + rng.random())
        life = rng.choice([math.nan, 3.0, rng.uniform(0, 9)])
        stream.history.end(ended(generation, life), rng.choice([None, 3]), teaches=True)
        epoch = rng.choice([math.nan, math.inf, rng.random()])
        stream.predicted[generation] = epoch, "keep_last=3"
    stream.stems = {b"model-.pt": 1000, b"\xff": 1}
    stream.companions = {b"model-.pt"}
    stream.missed = {b"\xff": 2}
    stream.size, stream.marked = 12345, True
    return [stream, Stream(5, {b"other"})]


@pytest.mark.parametrize("seed", range(5))
def test_streams_outlive_the_mount(seed: int) -> None:
    (stream, other) = streams_of(random.Random(seed))
    (stored, empty) = streams.loads(5, streams.dumps([stream, other]))
    assert empty == other
    assert (stored.series, stored.stems, stored.companions, stored.missed) == (
        stream.series, stream.stems, stream.companions, stream.missed,
    )  # fmt: skip
    assert (stored.size, stored.marked) == (stream.size, True)
    assert stored.history.births == stream.history.births
    assert stored.history.lives == stream.history.lives
    assert len(stored.history.ended) == ENDED_STORED
    for generation, (epoch, _) in stored.predicted.items():
        assert epoch == pytest.approx(stream.predicted[generation][0], abs=0.001, nan_ok=True)
    again = streams.dumps([stored])
    assert streams.dumps(streams.loads(5, again)) == again


@pytest.mark.parametrize("jobs", [1, 5, 20, 200])
def test_what_is_stored_has_a_bound(jobs: int) -> None:
    rng = random.Random(jobs)
    many = [streams_of(rng)[0] for _ in range(jobs)]
    for number, stream in enumerate(many):
        stream.series = {b"job-%d-" % number}
    stored = streams.dumps(many)
    assert len(stored) <= streams.STORED_MAX
    read = streams.loads(5, stored)
    assert read[-1].series == many[-1].series
    assert read[-1].history.lives == many[-1].history.lives
    assert len(read) == jobs or jobs > 5


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_what_cannot_be_read_teaches_nothing(stored: bytes) -> None:
    assert streams.loads(5, stored) == []


@given(st.data())
def test_no_damage_of_a_stored_stream_does_harm(data: st.DataObject) -> None:
    """Whatever a part of it is: the rest is read, or nothing is."""
    told = json.loads(streams.dumps(streams_of(random.Random(1))))
    key = data.draw(st.sampled_from(sorted(told[0])))
    odd: list[object] = [
        None,
        -1,
        1e400,
        math.nan,
        "x",
        [],
        [[]],
        [[1]],
        {},
        {"x": "y"},
        [["a", "b"]],
        True,
    ]
    told[0][key] = data.draw(st.sampled_from(odd))
    for stream in streams.loads(5, json.dumps(told).encode()):
        stream.history.saves(0.0, 100.0)
        stream.history.life(3)
        stream.history.every((30, 60))
        stream.missing({b"x"})
        streams.dumps([stream])


def test_a_file_that_is_given_up_is_no_longer_missed() -> None:
    stream = Stream(5, companions={b"model-.pt", b"ema-.pt"})
    assert stream.missing({b"model-.pt"}) == {b"ema-.pt"}
    stream.missed[b"ema-.pt"] = MISSED_MOST
    assert stream.missing({b"model-.pt"}) == set()
