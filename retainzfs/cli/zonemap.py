"""The zone map in a terminal: one cell a zone."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from retainzfs.lifetimes import format_size

RULER = 8  # columns for a row's first zone
GROUP = 8  # cells between two blanks


class Look(NamedTuple):
    letter: str
    colour: int  # of the 256 of xterm


LOOKS = {
    "metadata": Look("m", 141),
    "finite": Look("f", 39),
    "anchor": Look("a", 214),
    "unhinted": Look("u", 245),
    "cache": Look("c", 72),
    "scratch": Look("s", 180),
    "output": Look("o", 204),
    "collection": Look("g", 226),
}
EMPTY = Look(".", 238)
GONE = Look("x", 196)  # read-only or offline


def terminal_width() -> int:
    return shutil.get_terminal_size().columns


def drawn(zones: list[dict[str, Any]], width: int, *, coloured: bool) -> Iterator[str]:
    """Yield the lines of the map: a letter a zone, capital when full; a legend with numbers."""
    groups = max(1, (width - RULER) // (GROUP + 1))
    row = groups * GROUP
    for start in range(0, len(zones), row):
        cells = [_cell(zone, coloured=coloured) for zone in zones[start : start + row]]
        pieces = ["".join(cells[i : i + GROUP]) for i in range(0, len(cells), GROUP)]
        yield f"{start:{RULER - 2}}  {' '.join(pieces)}"
    yield ""
    yield from _legend(zones, coloured=coloured)


def _look(zone: dict[str, Any]) -> Look:
    if zone["condition"] in ("read_only", "offline"):
        return GONE
    return EMPTY if zone["class"] is None else LOOKS[zone["class"]]


def _cell(zone: dict[str, Any], *, coloured: bool) -> str:
    look = _look(zone)
    letter = look.letter.upper() if zone["condition"] == "full" else look.letter
    return _painted(letter, look, coloured=coloured)


def _painted(text: str, look: Look, *, coloured: bool) -> str:
    return f"\x1b[38;5;{look.colour}m{text}\x1b[0m" if coloured else text


def _legend(zones: list[dict[str, Any]], *, coloured: bool) -> Iterator[str]:
    counts: Counter[str] = Counter()
    live: Counter[str] = Counter()
    dead: Counter[str] = Counter()
    for zone in zones:
        name = zone["class"] or "empty"
        if zone["condition"] in ("read_only", "offline"):
            name = zone["condition"]
        counts[name] += 1
        live[name] += zone["live"]
        dead[name] += zone["dead"]
    looks = {**LOOKS, "empty": EMPTY, "read_only": GONE, "offline": GONE}
    yield "small letter: can still be written, capital: full"
    for name, look in looks.items():
        if counts[name]:
            letter = _painted(look.letter, look, coloured=coloured)
            sizes = f"{format_size(live[name])} live, {format_size(dead[name])} dead"
            yield f"{letter} {name:10} {counts[name]:6} zones" + (
                f"  {sizes}" if name != "empty" else ""
            )
