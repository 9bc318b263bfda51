"""Numbered names that no layout has: is retention at work behind them? (pure)

What gives a series away is that its oldest member goes soon after its newest has come, again and
again: nobody deletes the pieces of a data set so. A tree that is removed as a whole shows one
deletion at the most, since nothing comes in between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from retainzfs import lifetimes

SERIES_MAX = 1024  # that are watched at a time; the one that showed nothing for longest goes
NAMES_MAX = 1000  # a directory with more names holds something else
PROOFS = 2  # deletions that prove a series
BIRTHS = 9  # epochs that are kept for each, enough for a cadence
SIZE_LEAST = 1 << 20  # bytes; for less nobody needs a prediction
WEIGHTS_MAX = 64  # directories that are being emptied at a time


@dataclass(slots=True)
class Series:
    births: list[float] = field(default_factory=list)  # epochs, of the newest names
    newest: int | None = None  # number that came since the last deletion
    lives: list[float] = field(default_factory=list)  # later names there were, at each deletion


class Sightings:
    def __init__(self) -> None:
        self._series: OrderedDict[tuple[int, bytes], Series] = OrderedDict()
        self._weights: OrderedDict[tuple[int, bytes], int] = OrderedDict()

    def came(self, directory: int, name: bytes, epoch: float) -> None:
        """A name was made that belongs to no generation."""
        key = lifetimes.series_of(name)
        if key is None:
            return
        series = self._series.setdefault((directory, key), Series())
        self._series.move_to_end((directory, key))
        if len(self._series) > SERIES_MAX:
            self._series.popitem(last=False)
        series.births.append(epoch)
        del series.births[:-BIRTHS]
        number = lifetimes.number_in(name)
        series.newest = number if series.newest is None else max(number, series.newest)

    def emptied(self, directory: int, name: bytes, size: int) -> None:
        """So many bytes went from somewhere inside a directory of this name."""
        if lifetimes.series_of(name) is None:
            return
        self._weights[directory, name] = self._weights.get((directory, name), 0) + size
        if len(self._weights) > WEIGHTS_MAX:
            self._weights.popitem(last=False)

    def went(
        self, directory: int, name: bytes, others: Collection[bytes], size: int
    ) -> Series | None:
        """A name goes, of the names in its directory; return its series once that is proved.

        `size` are the bytes of a file; of a directory what went from it before counts.
        """
        if size + self._weights.pop((directory, name), 0) < SIZE_LEAST:
            return None
        key = lifetimes.series_of(name)
        series = self._series.get((directory, key)) if key is not None else None
        if series is None or series.newest is None or len(others) > NAMES_MAX:
            return None
        number = lifetimes.number_in(name)
        fresh, series.newest = series.newest > number, None
        later = sum(
            lifetimes.series_of(other) == key and lifetimes.number_in(other) > number
            for other in others
        )
        if not fresh or not later:
            return None
        series.lives.append(later)
        return series if len(series.lives) >= PROOFS else None

    def forget(self, directory: int, name: bytes) -> None:
        """A series is watched by somebody else from now on."""
        key = lifetimes.series_of(name)
        if key is not None:
            self._series.pop((directory, key), None)
