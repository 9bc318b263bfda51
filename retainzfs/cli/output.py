"""What the commands share: arguments that are sizes, tables, JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from retainzfs.hints import parse_size

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def size_argument(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
    """Print columns two blanks apart; `right` names the heads of those set flush right."""
    if not rows:
        return
    flush = [head in right.split() for head in heads]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        cells = [
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(row, widths, flush, strict=True)
        ]
        print("  ".join(cells).rstrip())
