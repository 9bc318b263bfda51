"""What hints are worth: retirement as foretold by the one of two witnesses that has erred less.

A hint may be wrong by as much each time: a trainer that deletes late, or a policy that promises
more than is kept. That is learned, and made up for. It may also be wrong by anything: then what
earlier generations of the stream have lived says more. Which it is the last deletions tell: every
witness is held against them, and the hint is believed unless it was clearly the worse one.

Pure; times as in `View`, errors in the same unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, median
from typing import Final, NamedTuple

RECENT: Final = 8  # deletions of a stream that are looked back upon
FEWEST: Final = 3  # from which on they tell more than they mislead
CLEARLY: Final = 1.0  # E, by which a life must have foretold better than hints have


class Death(NamedTuple):
    """A generation of a stream when it was deleted."""

    late: float  # after its hint; negative before it, -inf of an anchor
    life: float  # since it was saved


class Witness(NamedTuple):
    """How to foretell the next death of a stream: from hints, that are wrong by `lag`, or from
    its birth if `life` is not nan."""

    lag: float = 0.0
    life: float = math.nan

    def retirement(self, hint: float, birth: float, now: float) -> float:
        """The time of a generation's death; an anchor's stays what it is. One that is late already
        is expected to be late by as much again: it may be an anchor that nobody declared."""
        if math.isinf(hint):
            return hint
        foretold = hint + self.lag if math.isnan(self.life) else birth + self.life
        return foretold if foretold >= now else 2 * now - foretold

    def late(self, death: Death) -> float:
        """By how much a generation outlived what would have been foretold."""
        return death.late - self.lag if math.isnan(self.life) else death.life - self.life


HINTS: Final = Witness()


def witness(deaths: Sequence[Death], unit: float = 1.0) -> Witness:
    """The better one, from the deaths of a stream's finite generations in their order."""
    recent = [death for death in deaths if math.isfinite(death.late)][-RECENT:]
    if len(recent) < FEWEST:
        return HINTS
    lates = [death.late for death in recent]
    lives = [death.life for death in recent]
    # One that was in time shows that the others are not late as a rule.
    lag = median(lates) if min(lates) > 0 or max(lates) < 0 else 0.0
    life = median(lives)
    error_of_hints = mean(abs(late - lag) for late in lates)
    error_of_lives = mean(abs(lived - life) for lived in lives)
    if error_of_lives + CLEARLY * unit < error_of_hints:
        return Witness(life=life)
    return Witness(lag)
