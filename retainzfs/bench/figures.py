"""Samples of several targets, and the figures that come from them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

Samples = Mapping[str, Sequence[float]]  # target → seconds, or what else was measured, in order

WIDTH: Final = 58


@dataclass(frozen=True)
class Figure:
    """One figure with the least and the most of the repetitions; `goal` is its bound, a floor or a
    ceiling, if it has one."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    goal: float | None = None
    floor: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.floor else self.value <= self.goal

    def __str__(self) -> str:
        spread = f"({self.low:.3g}-{self.high:.3g})" if self.high > self.low else ""
        bound = "" if self.goal is None else f"  {'>=' if self.floor else '<='} {self.goal:g}"
        missed = "  MISSED" if self.met is False else ""
        text = f"{self.name:<{WIDTH}}{self.value:>9.3f} {self.unit:<6}{spread:<16}{bound}{missed}"
        return text.rstrip()


@dataclass
class Sheet:
    """The figures of a run, printed as they come, and what was not measured."""

    figures: list[Figure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        values: float | Sequence[float],
        unit: str,
        goal: float | None = None,
        *,
        floor: bool = True,
    ) -> None:
        """Keep the median of some values."""
        values = [values] if isinstance(values, float | int) else values
        median = statistics.median(values)
        self._keep(Figure(name, median, unit, min(values), max(values), goal, floor))

    def ratio(
        self,
        name: str,
        over: Sequence[float],
        under: Sequence[float],
        goal: float | None = None,
        *,
        floor: bool = True,
    ) -> None:
        """Keep the quotient of two medians, with the spread of those of one repetition each."""
        value = statistics.median(over) / statistics.median(under)
        each = [a / b for a, b in zip(over, under, strict=True)]
        self._keep(Figure(name, value, "x", min(*each, value), max(*each, value), goal, floor))

    def leave_out(self, name: str, reason: str) -> None:
        """Say what was not measured, and why."""
        self.left_out.append(f"{name}: not measured: {reason}")
        print(self.left_out[-1], flush=True)

    def _keep(self, figure: Figure) -> None:
        self.figures.append(figure)
        print(figure, flush=True)

    @property
    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.met is False]


def interleaved(repetitions: int, targets: Mapping[str, Callable[[], float]]) -> Samples:
    """Measure all targets in turn in every repetition, each on a disk that is at rest."""
    samples: dict[str, list[float]] = {name: [] for name in targets}
    for _ in range(repetitions):
        for name, measure in targets.items():
            os.sync()
            samples[name].append(measure())
    return samples


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of all does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
