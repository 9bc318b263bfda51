"""What the commands share: arguments that are sizes, tables, JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from retainzfs.errors import UsageError
from retainzfs.lifetimes import format_size, parse_size

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


# Names may hold anything: a line end breaks a table, and other control characters act on terminals.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def visible(text: str) -> str:
    return text.translate(CONTROL)


def size_argument(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_parent(option: str, path: Path | None) -> None:
    """Say before the work that a file cannot be made after it. Raises UsageError."""
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}")


def rate_argument(text: str) -> int:
    """Bytes a second, at least one."""
    rate = size_argument(text)
    if rate == 0:
        raise argparse.ArgumentTypeError("a rate of 0 would never end")
    return rate


class Progress:
    """Shows how far something is: a line that is redrawn on a terminal, a line at times elsewhere.

    Called with what is done and what there is in all: bytes, or what `shown` is for.
    """

    EVERY = 16 << 30  # bytes between two lines where nobody watches

    def __init__(self, what: str, shown: Callable[[int], str] = format_size) -> None:
        self._what = what
        self._text = shown
        self._live = sys.stderr.isatty()
        self._shown = 0

    def __call__(self, done: int, total: int) -> None:
        step = max(1, total // 100) if self._live else self.EVERY
        if done - self._shown < step and (done < total or not self._live):
            return
        self._shown = done
        text = f"{self._what}: {done / total:.0%}, {self._text(done)} of {self._text(total)}"
        end = "\r" if self._live and done < total else "\n"
        print(f"{text:60}" if self._live else text, end=end, file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
    """Print columns two blanks apart; `right` names the heads of those set flush right."""
    if not rows:
        return
    rows = [[visible(cell) for cell in row] for row in rows]
    flush = [head in right.split() for head in heads]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        cells = [
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(row, widths, flush, strict=True)
        ]
        print("  ".join(cells).rstrip())
