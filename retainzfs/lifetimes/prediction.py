"""When a generation retires (section II-C of the RetainZ paper: d = a + c*K).

a is the epoch of its birth, c the cadence of its stream, K the number of generations kept: under
latest-K it is dead when the K-th newer one is committed. Anchors never retire. Where nobody says
K, or a program does not do as it says, K is what the stream's history shows.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import NamedTuple

from retainzfs.lifetimes.attributes import Policy

CADENCE_HISTORY = 8
"""Saves that a learned cadence looks back on: enough to outvote pauses, few enough to follow."""

E_PER_CADENCE = 4.0
"""Placement's constants are in quarters of a cadence."""

LAG_LEAST = 0.5
"""Saves. Deletion comes a moment after the save that retires; less than that is no lag."""


class Hint(NamedTuple):
    """A retirement epoch (inf: an anchor; None: nothing known, unhinted) and why."""

    retire: float | None
    origin: str


class Learned(NamedTuple):
    """What a stream's own history shows; None where it shows nothing."""

    cadence_s: float | None = None
    life: float | None = None
    """Saves from birth to deletion."""
    every: int | None = None
    """Multiples of this number were kept when their neighbours were deleted."""


NOTHING = Learned()


def retirement(birth: float, learned: Learned, policy: Policy, number: int | None = None) -> Hint:
    """The retirement epoch of a generation born at epoch `birth`, with the reason in words.

    `number` is the generation's. A `birth` or `cadence` that the policy states is taken instead. A
    stated retirement goes before everything, unless `anchor=1` is stated nearer to the file; an
    `anchor=0` nearer than `keep_every` releases a milestone.
    """
    if policy.retire is not None and not (policy.anchor and policy.nearer("anchor", "retire")):
        return Hint(policy.retire, f"retire={policy.retire:g}")
    if policy.anchor:
        return Hint(math.inf, "anchor=1")
    released = policy.anchor is False and policy.nearer("anchor", "keep_every")
    every = None if released else policy.keep_every
    if every is not None and number is not None and number % every == 0:
        return Hint(math.inf, f"keep_every={every}: {number} is a multiple of it")
    if policy.anchor is None and every is None and learned.every and number is not None:
        every = learned.every
        if number % every == 0:
            return Hint(math.inf, f"history: multiples of {every} were kept")
    return _finite(birth, learned, policy)


def _finite(birth: float, learned: Learned, policy: Policy) -> Hint:
    saves, why = _saves(learned.life, policy.keep_last)
    if saves is None:
        return Hint(None, why)
    cadence = learned.cadence_s if policy.cadence_s is None else policy.cadence_s
    if cadence is None:
        return Hint(None, f"{why}, but the stream's cadence is not known yet")
    how = "learned" if policy.cadence_s is None else "declared"
    start = birth if policy.birth is None else policy.birth
    return Hint(start + cadence * saves, f"{why}, {how} cadence {cadence:g} s")


def _saves(life: float | None, keep: int | None) -> tuple[float | None, str]:
    """Saves from birth to retirement, and why."""
    if keep is None:
        if life is None:
            return None, "no policy, and no history yet"
        return life, f"history: deleted after {life:.1f} saves"
    if life is None or abs(life - keep) < LAG_LEAST:
        return keep, f"keep_last={keep}"
    late = f"{life - keep:.1f} saves later" if life > keep else f"{keep - life:.1f} saves earlier"
    return life, f"keep_last={keep}, but deleted {late}"


def learned_cadence(intervals: Sequence[float]) -> float | None:
    """Seconds between saves, from the stream's latest intervals (oldest first), None without any.

    The lower median of the last 8: a pause only lengthens an interval, so of two candidates the
    shorter is the better witness, and up to half of them may be pauses. Intervals that are not
    positive (a generation saved again at once) say nothing.
    """
    usable = [value for value in intervals if 0 < value < math.inf]
    return median_low(usable[-CADENCE_HISTORY:]) if usable else None


def weighted_median(weighted: Iterable[tuple[float, float]]) -> float | None:
    """Return the lower weighted median of (value, weight); None of nothing."""
    ordered = sorted(weighted)
    half = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        half -= weight
        if half <= 0:
            return value
    return None
