"""Pictures of replays, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path

from retainzfs.evaluation.experiment import Cell


def require() -> None: ...


def draw_all(cells: list[Cell], where: Path) -> None: ...
