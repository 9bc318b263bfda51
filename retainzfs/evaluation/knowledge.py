"""What a stream's own saves and deletions have told: all that a replayed policy learns from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

from retainzfs.evaluation.trust import HINTS, RECENT, Death, Witness, witness
from retainzfs.placement import Arrival

PUNCTUAL: Final = 1e-6  # E; times are sums of floats
OVERRUN: Final = 0.05  # of a generation's size; it fits into what its last zone has left


class Size(NamedTuple):
    """Bytes of a generation: as told and as expected when it began, of the one before, and real."""

    told: int
    expected: int
    before: int
    real: int


@dataclass
class Knowledge:
    """What a stream's own saves and deletions have told so far."""

    keep: int
    cadence: float  # declared
    intervals: list[float] = field(default_factory=list)
    last: float = -math.inf
    size: int = 0
    deaths: list[Death] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)
    company: list[bool] = field(default_factory=list)
    witness: Witness = HINTS

    @property
    def every(self) -> float:
        return median(self.intervals[-RECENT:]) if self.intervals else self.cadence

    @property
    def deletes_in_time(self) -> bool:
        return all(self.witness.late(death) <= PUNCTUAL for death in self.deaths[-RECENT:])

    def expects(self, told: int) -> int:
        """Bytes of the generation that begins: what is told, or as many as the one before had, if
        that has been nearer to the truth."""
        recent = self.sizes[-RECENT:]
        wrong = sum(abs(size.told - size.real) for size in recent)
        return self.size if sum(abs(size.before - size.real) for size in recent) < wrong else told

    @property
    def reliable(self) -> bool:
        """Whether its saves are no larger than expected, and nobody else saves meanwhile."""
        sizes_hold = all(s.real <= s.expected * (1 + OVERRUN) for s in self.sizes[-RECENT:])
        return sizes_hold and not any(self.company[-RECENT:])

    def saved(self, now: float, told: int, expected: int, real: int) -> None:
        if math.isfinite(self.last):
            self.intervals.append(now - self.last)
        self.sizes.append(Size(told, expected, self.size, real))
        self.last, self.size = now, real

    def deleted(self, late: float, life: float) -> None:
        self.deaths.append(Death(late, life))
        self.witness = witness(self.deaths)

    def next(self, now: float) -> Arrival | None:
        if not math.isfinite(self.last):
            return None
        every = self.every
        coming = self.last + every
        if coming <= now:
            coming = now + every
        life = self.witness.retirement(self.keep * every, 0.0, 0.0)
        return Arrival(coming, life, self.size, every)
