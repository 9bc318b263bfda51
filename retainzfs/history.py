"""What a stream teaches: when its saves began, and how long each of them was kept (pure).

A stream has a clock of its own, which counts saves: it stands at 17.5 half-way between the 17th and
the 18th. Retention is a matter of this clock, whatever else happens: a pause of a night, a restart,
a cadence that changes do not alter that the third newer save is the one that ends a generation.

What is learned is stored as JSON with the stream's directory (docs/on-disk-format.md).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, NamedTuple

from retainzfs import lifetimes

BIRTHS = 32  # saves whose beginning is remembered; of older ones the cadence tells enough
LIVES = 8  # deletions that a learned lifetime looks back on
LIVES_LEAST = 2  # one deletion may be anything
ENDED = 64  # deletions that can be looked at
ENDED_STORED = 16  # of these, how many outlive the mount
A_SAVE = 2  # deletions between two saves that teach anything: more of them is a clean-up
SPREAD = 1.0  # saves: when most lifetimes are as near as that to their median, it is systematic


class Ended(NamedTuple):
    """A generation that was deleted; epochs, and lifetimes in saves. nan: not known."""

    number: int
    birth: float
    predicted: float  # when its first byte was placed; inf: it was an anchor
    deleted: float
    saves: float
    saves_predicted: float
    reaped: bool
    origin: str


@dataclass(slots=True)
class History:
    births: list[tuple[float, int]] = field(default_factory=list)  # (epoch, generation), sorted
    # Of deleted generations, oldest first: saves that each was kept for, and the keep_last that
    # was stated then (0: none).
    lives: list[tuple[float, int]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    taught: int = 0  # deletions since the newest save began

    def begin(self, generation: int, epoch: float) -> None:
        """A save began, or one that had seemed to have failed was completed."""
        if any(known == generation for _, known in self.births):
            return
        if not self.births or epoch >= self.births[-1][0]:
            self.taught = 0
        self.births.insert(bisect_right(self.births, (epoch, generation)), (epoch, generation))
        del self.births[:-BIRTHS]

    def fail(self, generation: int) -> None:
        """A save was none: nobody counts it."""
        self.births = [birth for birth in self.births if birth[1] != generation]

    @property
    def cadence_s(self) -> float | None:
        """Seconds between saves, None before the second."""
        epochs = [epoch for epoch, _ in self.births]
        return lifetimes.learned_cadence([b - a for a, b in itertools.pairwise(epochs)])

    def saves(self, birth: float, epoch: float, *, ahead: bool = False) -> float:
        """Return the saves from a birth to an epoch; nan while there is no cadence.

        A pause counts as one save at most. With `ahead` the epoch may lie in the future, and the
        saves until then are those that the cadence promises.
        """
        cadence = self.cadence_s
        if cadence is None or not math.isfinite(epoch):
            return math.nan
        return self._position(epoch, cadence, ahead=ahead) - self._position(birth, cadence)

    def _position(self, epoch: float, cadence: float, *, ahead: bool = False) -> float:
        """Return where the stream's clock stands at an epoch; 0 at the first birth."""
        epochs = [birth for birth, _ in self.births]
        passed = bisect_right(epochs, epoch)
        if passed == 0:
            return (epoch - epochs[0]) / cadence
        since = epoch - epochs[passed - 1]
        if passed < len(epochs):
            return passed - 1 + since / (epochs[passed] - epochs[passed - 1])
        return passed - 1 + (since / cadence if ahead else min(1.0, since / cadence))

    def end(self, ended: Ended, keep: int | None, *, teaches: bool) -> None:
        """A generation was deleted. What `teaches` was complete, finite, not the newest, and
        deleted by its program."""
        self.ended.append(ended)
        del self.ended[:-ENDED]
        if not teaches or math.isnan(ended.saves) or self.taught >= A_SAVE:
            return
        self.taught += 1
        self.lives.append((ended.saves, keep or 0))
        del self.lives[:-LIVES]

    def life(self, keep: int | None) -> float | None:
        """Return the saves that a generation is kept for, None while nothing speaks for one number.

        Under `keep_last` it is that and the lag that was seen, so that a new K holds at once.
        """
        lives = [saves - stated for saves, stated in self.lives if bool(stated) == bool(keep)]
        if len(lives) < LIVES_LEAST:
            return None
        # The mean of those near the median: a program that deletes now before a save and now
        # behind it makes the median itself jump by a save.
        middle = median(lives)
        near = [life for life in lives if abs(life - middle) <= SPREAD]
        return mean(near) + (keep or 0) if 4 * len(near) >= 3 * len(lives) else None

    def every(self, kept: Collection[int]) -> int | None:
        """Return N when the numbers that were kept, older than what was deleted, are multiples
        of N and no number that was deleted is one."""
        rest = [ended.number for ended in self.ended if not ended.reaped]
        if len(kept) < LIVES_LEAST or not rest:
            return None
        step = math.gcd(*kept)
        return step if step > 1 and all(number % step for number in rest) else None

    def encode(self) -> dict[str, Any]:
        """Return what outlives the mount, for `json`."""
        ended = self.ended[-ENDED_STORED:]
        return {
            "births": [[epoch, generation] for epoch, generation in self.births],
            "lives": [[saves, keep] for saves, keep in self.lives],
            "ended": [[stored(value) for value in one] for one in ended],
        }

    @classmethod
    def decode(cls, stored: Any) -> History:
        """Raises ValueError for what `encode` did not write."""
        try:
            births = [(float(epoch), int(generation)) for epoch, generation in stored["births"]]
            lives = [(float(saves), int(keep)) for saves, keep in stored["lives"]]
            ended = [_ended(one) for one in stored["ended"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"no history of a stream: {error}") from error
        if not all(math.isfinite(time) for time, _ in (*lives, *births)):
            raise ValueError("a history has times that are none")
        return cls(sorted(births)[-BIRTHS:], lives[-LIVES:], ended)


def stored(value: Any) -> Any:
    """Return a value for `json`; of a float so much as it means. `told` reads it."""
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return round(value, 3) if math.isfinite(value) else "inf"


def told(value: Any) -> float:
    return math.nan if value is None else float(value)


def _ended(one: Any) -> Ended:
    number, *epochs, reaped, origin = one
    birth, predicted, deleted, saves, foretold = map(told, epochs)
    return Ended(int(number), birth, predicted, deleted, saves, foretold, bool(reaped), str(origin))
