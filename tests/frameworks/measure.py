"""What a mount predicted of a framework's generations, against what the framework did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import COMMAND_S, Live, retainzfs
from tests.frameworks.catalogue import Framework
from tests.frameworks.job import CLOCK, Timeline

IMAGE_SIZE = 256 << 20
ZONE_SIZE = 1 << 20  # a save fills several
TREE = Path(__file__).parents[2]

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training run into a directory, and what the mount told of it."""

    history: list[Row]
    generations: list[Row]
    trained: Row
    resumed: Row


@dataclass(frozen=True)
class Measurement:
    framework: Framework
    declared: Run
    """With the framework's attributes set on the directory."""
    learned: Run
    """With no attribute at all."""
    status: Row
    shown: tuple[str, ...]
    """What `generations` and `generations --history` printed of both."""


def measure(live: Live, framework: Framework) -> Measurement:
    """Mount, and let the framework train and resume in two directories."""
    clock = live.base / "clock"
    Timeline(clock)
    live.mount(patch=CLOCK.format(path=str(clock)))
    declared, learned = live.path / "declared", live.path / "learned"
    declared.mkdir()
    learned.mkdir()
    for name, value in framework.attributes.items():
        os.setxattr(declared, f"user.retainz.{name}", value.encode())
    trained = work(framework, "train", clock, f"{declared}+", learned)
    runs = [(_told(path, "history"), _told(path, "generations")) for path in (declared, learned)]
    status = json.loads(_said("status", live.path, "--json"))
    shown = tuple(
        _said("generations", path, *option)
        for option in ((), ("--history",))
        for path in (declared, learned)
    )
    resumed = work(framework, "resume", clock, f"{declared}+", learned)
    first, second = (Run(*run, *ends) for run, *ends in zip(runs, trained, resumed, strict=True))
    return Measurement(framework, first, second, status, shown)


def work(framework: Framework, act: str, clock: Path, *directories: Path | str) -> list[Row]:
    """Run the framework in a process of its own and return how it ended in each directory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.frameworks.worker", framework.name, act]
        + [str(path) for path in (clock, *directories)],
        capture_output=True,
        text=True,
        timeout=4 * COMMAND_S,
        check=False,
        cwd=TREE,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
    )
    if done.returncode:
        raise RuntimeError(f"{framework.name}: {act} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _told(path: Path, name: str) -> list[Row]:
    rows: list[Row] = json.loads(os.getxattr(path, f"user.retainz.{name}"))
    return rows


def _said(*arguments: str | Path) -> str:
    done = retainzfs(*arguments)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def share(rows: Sequence[Row]) -> float:
    """Return the share of generations that were deleted within one save of the prediction."""
    known = [row for row in rows if row["saves_predicted"] is not None]
    near = [row for row in known if abs(row["saves"] - row["saves_predicted"]) <= 1]
    return len(near) / len(rows)
