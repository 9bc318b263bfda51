"""What a training program is told, what it tells, and the time that passes while it trains."""

from __future__ import annotations

import mmap
import os
import random
from dataclasses import dataclass
from pathlib import Path

from tests.frameworks.catalogue import STEPS

INTERVAL_S = 60.0
JITTER = 0.1
PATIENCE_S = 60.0

# For the daemon, before anything else is imported: real time and what the training adds to it.
CLOCK = """
import mmap, time
with open({path!r}, "r+b") as file:
    ahead = memoryview(mmap.mmap(file.fileno(), 8)).cast("d")
real = time.monotonic
time.monotonic = lambda: real() + ahead[0]
"""


class Timeline:
    """Seconds that the daemon's clock is ahead of the real one, in a file that it has mapped."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self.ahead = memoryview(mmap.mmap(file.fileno(), 8)).cast("d")
        self.random = random.Random(seed)

    def train(self) -> None:
        """Let the time pass that lies between two saves, give or take a tenth."""
        self.ahead[0] += INTERVAL_S * self.random.uniform(1 - JITTER, 1 + JITTER)


@dataclass(frozen=True)
class Job:
    """A training run: `saves` saves, one each STEPS steps, and then one more step."""

    directory: Path
    saves: int
    keep: int
    timeline: Timeline
    variant: str = ""
    declares: bool = False
    """Whether the program tells the mount that a save is complete, where nothing else does."""

    @property
    def last(self) -> int:
        """The number of the last step, the only one after the last save."""
        return self.saves * STEPS + 1

    def before(self, step: int) -> None:
        """Has to be called at the begin of every step."""
        if step % STEPS == 0:
            self.timeline.train()

    def declare(self, generation: Path) -> None:
        if self.declares:
            os.setxattr(generation, "user.retainz.commit", b"1")


@dataclass(frozen=True)
class Outcome:
    """How a run ended, to the bit."""

    loss: str
    parameters: str  # SHA-256
