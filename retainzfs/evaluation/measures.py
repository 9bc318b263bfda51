"""What a replay measures, and what device commands cost in simulated time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from retainzfs.evaluation.workload import Workload
from retainzfs.zone import Totals

EXACT: Final = 1e-9  # epochs that count as none


class Costs(NamedTuple):
    """A device model, in milliseconds: a mid-range zoned drive, writes of a few commands deep."""

    write: float = 1000 / (1000 << 20)  # for each byte
    read: float = 1000 / (2000 << 20)
    finish: float = 2.0  # for each command
    reset: float = 3.0
    commit: float = 0.2  # a journal block and a flush


DRIVE: Final = Costs()


@dataclass
class Result:
    """What one replay measured. Zones are zone capacities, times are those of `Costs`."""

    saves: int = 0
    saves_done: int = 0
    overhead_zones: float = 0.0
    invalid_zones: float = 0.0
    tail_zones: float = 0.0
    write_amplification: float = 0.0
    copied_bytes: int = 0
    p99_zones: float = 0.0
    p99_ms: float = 0.0
    decision_us: float = 0.0
    resets: int = 0
    finishes: int = 0
    borrowed: int = 0
    stranded_bytes: int = 0  # written by the device's own finish, if it pads


class Meter:
    """Measures a replay as it goes on: byte-time of dead bytes and of tails, and each save."""

    def __init__(self, workload: Workload) -> None:
        self._capacity, self._warm_up = workload.capacity, workload.warm_up
        self._dead = self._tails = 0.0
        self._saves: list[tuple[float, float]] = []

    def passes(self, now: float, until: float, totals: Totals) -> None:
        """From `now` on the zones stay as they are."""
        counted = until - max(now, self._warm_up)
        if counted > 0:
            self._dead += totals.dead * counted
            self._tails += (totals.tail + totals.stranded) * counted

    def saved(self, nbytes: float, took_ms: float) -> None:
        """A save is done, for which so many bytes were written, copies included."""
        self._saves.append((nbytes / self._capacity, took_ms))

    def finish(self, result: Result, now: float) -> None:
        """Put what was measured until now into a result."""
        span = max(now - self._warm_up, EXACT) * self._capacity
        result.invalid_zones, result.tail_zones = self._dead / span, self._tails / span
        result.overhead_zones = result.invalid_zones + result.tail_zones
        result.saves_done = len(self._saves)
        result.p99_zones = percentile([zones for zones, _ in self._saves], 0.99)
        result.p99_ms = percentile([ms for _, ms in self._saves], 0.99)


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
