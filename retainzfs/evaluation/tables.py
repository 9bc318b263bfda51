"""What is asked of the replays, and which answer counts.

`zenfs` knows nothing of retirements; what it makes of a checkpoint depends on a mapping of
lifetimes and on a threshold. It is always shown with the best of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Final

from retainzfs.evaluation.experiment import Cell, Setting
from retainzfs.evaluation.published import DESIGN, NOTHING, PAPER, Key, Published
from retainzfs.placement.zenfs import MAPPINGS

THRESHOLDS: Final = (0.0, 5.0, 10.0, 20.0)  # percent of a zone, below which a tail is given up

# The rows of the main table.
PRESSURES: Final = (
    (0.84, "fixed"),
    (0.84, "common"),
    (0.90, "fixed"),
    (0.90, "common"),
    (0.92, "common"),
    (0.94, "common"),
    (0.95, "common"),
)
WIDE: Final = Setting("retainz", parameters=(("span", 4.0),))
SAME_RULE: Final = (
    Setting("zenfs"),
    Setting("isolate"),
    Setting("equal-epoch"),
    Setting("retainz"),
    WIDE,
    Setting("plan-bare"),
)
OWN_RULE: Final = (Setting("plan"), Setting("plan-ahead"))


def main_table() -> list[Setting]:
    """Every policy at every pressure; those with a rule of their own, once for every load."""
    asked = [replace(s, load=load, admission=rule) for load, rule in PRESSURES for s in SAME_RULE]
    loads = list(dict.fromkeys(load for load, _ in PRESSURES))
    asked += [replace(s, load=load) for load in loads for s in OWN_RULE]
    return sorted(asked, key=lambda setting: setting.load)


def variants(setting: Setting) -> list[Setting]:
    """The settings to run for an answer: `zenfs` with whatever of its parameters is not given."""
    if setting.policy != "zenfs":
        return [setting]
    given = dict(setting.parameters)
    ways = {"mapping": tuple(MAPPINGS), "finish_threshold": THRESHOLDS}
    return [
        replace(setting, parameters=tuple(zip(ways, values, strict=True)))
        for values in product(*((given[n],) if n in given else ways[n] for n in ways))
    ]


def best(cells: Iterable[Cell]) -> Cell:
    """The one that does most saves, and of these the one with the least overhead."""
    return min(cells, key=lambda cell: (-cell.mean("saves_done"), cell.mean("overhead_zones")))


def answers(asked: Iterable[Setting], cells: Mapping[Setting, Cell]) -> dict[Setting, Cell]:
    """The cell that counts for each setting, in the order asked."""
    return {s: best(cells[variant] for variant in variants(s)) for s in asked}


def published(asked: Setting, where: Mapping[Key, Published]) -> Published:
    if (asked.active, asked.zone_size, asked.rank, asked.to_tails) != (0, 0, "dead-time", True):
        return NOTHING
    name = "zenfs" if asked.policy == "zenfs" else asked.label
    exact = where.get((asked.family, asked.load, asked.rule, name))
    return exact or where.get((asked.family, asked.load, "", name), NOTHING)


def paper(asked: Setting) -> Published:
    return published(asked, PAPER)


def design(asked: Setting) -> Published:
    return published(asked, DESIGN)


# Rows

HEADS: Final = (
    *("OVERHEAD", "INVALID", "TAIL", "WA", "SAVES", "P99-ZONES", "P99-MS", "DECISION-US"),
)


def columns(cell: Cell) -> list[str]:
    """The cells of a row below `HEADS`."""
    return [
        spread(cell, "overhead_zones", 2),
        f"{cell.mean('invalid_zones'):.2f}",
        f"{cell.mean('tail_zones'):.2f}",
        spread(cell, "write_amplification", 3),
        saves(cell),
        spread(cell, "p99_zones", 1),
        f"{cell.mean('p99_ms'):.1f}",
        f"{cell.mean('decision_us'):.0f}",
    ]


def spread(cell: Cell, figure: str, digits: int) -> str:
    """The mean, and of several seeds the least and the greatest."""
    values = cell.values(figure)
    told = f"{cell.mean(figure):.{digits}f}"
    if len(values) > 1:
        told += f" [{min(values):.{digits}f}-{max(values):.{digits}f}]"
    return told


def saves(cell: Cell) -> str:
    """All of them, or how many of how many, where a seed ran out of space."""
    done = [int(value) for value in cell.values("saves_done")]
    asked = {result.saves for result in cell.results.values()}
    if not cell.exhausted:
        return str(max(done))
    span = str(max(done)) if min(done) == max(done) else f"{min(done)}-{max(done)}"
    return f"{span} of {max(asked)}"
