"""What a replay measures, and what device commands cost in simulated time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple


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


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
