"""Compare the policies with the best placement that knows the future, on short instances."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import mean

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
    """A line for each seed, and the means with their ratio to that of the best known."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    widths = [max(len(name), 10) for name in policies]
    columns = zip(["certified", "best known", *policies], [10, 10, *widths], strict=True)
    print("seed ", *(name.rjust(width) for name, width in columns), sep="  ")
    for seed in dict.fromkeys(row.seed for row in rows):
        own = [row for row in rows if row.seed == seed]
        print_line(str(seed), [own[0].certified, own[0].best_known], own, widths)
    best, least = mean(row.best_known for row in rows), mean(row.certified for row in rows)
    means = [
        bound.Row(0, name, mean(row.overhead for row in rows if row.policy == name), best, least)
        for name in policies
    ]
    print_line("mean", [least, best], means, widths)
    print(
        "ratio".ljust(29),
        *(f"{row.ratio:{w}.3f}" for row, w in zip(means, widths, strict=True)),
        sep="  ",
    )


def print_line(
    label: str, bounds: Sequence[float], rows: Sequence[bound.Row], widths: Sequence[int]
) -> None:
    figures = [f"{value:10.3f}" for value in bounds]
    figures += [f"{row.overhead:{width}.3f}" for row, width in zip(rows, widths, strict=True)]
    print(label.ljust(5), *figures, sep="  ")


if __name__ == "__main__":
    sys.exit(main())
