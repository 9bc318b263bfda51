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
