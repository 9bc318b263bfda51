"""The ratios of a run as bars, with their goals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure as Drawing

from retainzfs.bench.figures import Figure

MET, MISSED, PLAIN = "#2b7a4b", "#b3412f", "#8a8f98"


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Draw the ratios on a logarithmic scale; a tick marks the goal."""
    ratios = [figure for figure in figures if figure.unit == "x"][::-1]
    drawing = Drawing(figsize=(9, 0.6 + 0.28 * len(ratios)), layout="constrained")
    axes = drawing.add_subplot()
    for place, figure in enumerate(ratios):
        colour = PLAIN if figure.met is None else MET if figure.met else MISSED
        axes.barh(place, figure.value - 1, left=1, color=colour)
        axes.plot([figure.low, figure.high], [place, place], color="black", linewidth=1)
        if figure.goal is not None:
            axes.plot([figure.goal] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
    axes.set_xscale("log")
    axes.set_yticks(range(len(ratios)), [figure.name for figure in ratios], fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("ratio within one run; the tick is the goal")
    drawing.savefig(path, dpi=110)
