"""Compare the policies with the best placement that knows the future, on short instances."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from statistics import mean

from retainzfs.cli.output import print_table
from retainzfs.errors import UsageError
from retainzfs.evaluation import bound
from retainzfs.evaluation.workload import FAMILIES


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bound",
        description=f"{__doc__} Overheads are in zone-epochs a save. The optimum lies between what"
        " is certified and the best known.",
    )
    parser.add_argument("--family", default="paper", choices=FAMILIES)
    parser.add_argument("--seeds", type=int, default=8, help="how many (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=bound.SAVES, help="(default: %(default)s)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=bound.TIME_LIMIT_S,
        metavar="SECONDS",
        help="for the bound of one seed (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        rows = bound.table(
            range(given.seeds), given.saves, given.time_limit, family=given.family, jobs=given.jobs
        )
    except UsageError as error:
        print(f"bound: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
    else:
        show(rows)
    return 0


def show(rows: Sequence[bound.Row]) -> None:
    """A line for each policy, below what encloses the optimum: every seed, their mean, and its
    ratio to that of the best known."""
    one = [row for row in rows if row.policy == rows[0].policy]
    figures = {
        "certified": [row.certified for row in one],
        "best known": [row.best_known for row in one],
    }
    for row in rows:
        figures.setdefault(row.policy, []).append(row.overhead)
    best = mean(figures["best known"])
    heads = ["OVERHEAD", *(f"{row.seed}" for row in one), "MEAN", "RATIO"]
    lines = []
    for name, values in figures.items():
        ratio = mean(values) / best if best else math.inf
        lines.append([name, *(f"{value:.3f}" for value in (*values, mean(values), ratio))])
    print_table(heads, lines, " ".join(heads[1:]))


if __name__ == "__main__":
    sys.exit(main())
