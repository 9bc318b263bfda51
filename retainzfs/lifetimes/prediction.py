"""When a generation retires (section II-C of the RetainZ paper: d = a + c*K).

a is the epoch of its birth, c the cadence of its stream, K the number of generations kept: under
latest-K it is dead when the K-th newer one is committed. Anchors never retire.
"""

import math
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from retainzfs.lifetimes.attributes import Policy

CADENCE_HISTORY = 8
"""Saves that a learned cadence looks back on: enough to outvote pauses, few enough to follow."""


class Hint(NamedTuple):
    """A retirement epoch (inf: an anchor; None: nothing known, unhinted) and why."""

    retire: float | None
    origin: str


def retirement(
    birth: float, cadence_s: float | None, policy: Policy, number: int | None = None
) -> Hint:
    """The retirement epoch of a generation born at epoch `birth`, with the reason in words.

    `cadence_s` is the learned cadence of its stream (seconds, None while unknown) and `number` the
    generation's; a `birth` or `cadence` that the policy states is taken instead. A stated
    retirement goes before everything, unless `anchor=1` is stated nearer to the file; an `anchor=0`
    nearer than `keep_every` releases a milestone.
    """
    if policy.retire is not None and not (policy.anchor and policy.nearer("anchor", "retire")):
        return Hint(policy.retire, f"retire={policy.retire:g}")
    if policy.anchor:
        return Hint(math.inf, "anchor=1")
    released = policy.anchor is False and policy.nearer("anchor", "keep_every")
    every = None if released else policy.keep_every
    if every is not None and number is not None and number % every == 0:
        return Hint(math.inf, f"keep_every={every}: {number} is a multiple of it")
    if policy.keep_last is None:
        return Hint(None, "neither retire, anchor nor keep_last is set")
    keep = f"keep_last={policy.keep_last}"
    cadence = cadence_s if policy.cadence_s is None else policy.cadence_s
    if cadence is None:
        return Hint(None, f"{keep}, but the stream's cadence is not known yet")
    how = "learned" if policy.cadence_s is None else "declared"
    start = birth if policy.birth is None else policy.birth
    return Hint(start + cadence * policy.keep_last, f"{keep}, {how} cadence {cadence:g} s")


def learned_cadence(intervals: Sequence[float]) -> float | None:
    """Seconds between saves, from the stream's latest intervals (oldest first), None without any.

    The lower median of the last 8: a pause only lengthens an interval, so of two candidates the
    shorter is the better witness, and up to half of them may be pauses. Intervals that are not
    positive (a generation saved again at once) say nothing.
    """
    usable = [value for value in intervals if 0 < value < math.inf]
    return median_low(usable[-CADENCE_HISTORY:]) if usable else None
