"""The ratios of a run as bars, with their goals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from retainzfs.bench.figures import Figure
from retainzfs.evaluation import pictures

MET: Final = {True: "#2b7a4b", False: "#b3412f", None: "#8a8f98"}  # colours


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Draw the ratios on a logarithmic scale; a tick marks the goal."""
    ratios = [figure for figure in figures if figure.unit == "x"][::-1]
    drawing = pictures.blank(9, 0.6 + 0.28 * len(ratios))
    axes = drawing.add_subplot()
    for place, figure in enumerate(ratios):
        axes.barh(place, figure.value - 1, left=1, color=MET[figure.met])
        axes.plot([figure.low, figure.high], [place, place], color="black", linewidth=1)
        if figure.goal is not None:
            axes.plot([figure.goal] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
    axes.set_xscale("log")
    axes.set_yticks(range(len(ratios)), [figure.name for figure in ratios], fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("ratio within one run; the tick is the goal")
    pictures.save(drawing, path)
