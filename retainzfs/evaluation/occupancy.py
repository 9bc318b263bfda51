"""What every zone held at every epoch of one replay: for a picture, and for checking sums."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from retainzfs.evaluation.experiment import Setting, simulator
from retainzfs.evaluation.simulator import Simulator
from retainzfs.zone import State


class Content(NamedTuple):
    """One zone. Bytes; `live` is (retirement, bytes) by retirement, inf for what never retires."""

    live: tuple[tuple[float, int], ...]
    dead: int
    tail: int  # unused, and the zone is in use


@dataclass
class Strip:
    """Observer of a replay: the zones over time; empty ones are left out."""

    capacity: int = 0
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    zones: list[dict[int, Content]] = field(default_factory=list)

    def __call__(self, replay: Simulator, until: float) -> None:
        self.capacity = replay.capacity
        self.begins.append(replay.now)
        self.ends.append(until)
        self.zones.append(
            {
                zone.index: Content(
                    tuple(sorted((replay.hints[g], nbytes) for g, nbytes in zone.live.items())),
                    zone.write_pointer - zone.live_bytes,
                    zone.capacity - zone.write_pointer,
                )
                for zone in replay.table.zones
                if zone.state is not State.EMPTY
            }
        )

    def at(self, time: float) -> dict[int, Content]:
        """The zones at that time; none before and after the replay."""
        for begin, end, zones in zip(self.begins, self.ends, self.zones, strict=True):
            if begin <= time < end:
                return zones
        return {}


def strip(setting: Setting, seed: int) -> Strip:
    """Replay one input and keep what the zones held."""
    kept = Strip()
    simulator(setting, seed, kept).run()
    return kept


def finite(content: Content) -> bool:
    """Whether a zone is more than a place of what never retires."""
    return content.dead > 0 or any(not math.isinf(retire) for retire, _ in content.live)
