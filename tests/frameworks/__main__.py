"""Run frameworks on a fresh mount each, and print predicted and actual deletions side by side."""

from __future__ import annotations

import argparse
import sys

from tests.conftest import living
from tests.frameworks.catalogue import FRAMEWORKS
from tests.frameworks.measure import IMAGE_SIZE, ZONE_SIZE, Measurement, Row, error, measure, share

COLUMNS = "{:>10}  {:>10}  {:>10}  {:>6}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/frameworks",
        description="Train with real frameworks on a mount, and print for each generation that the"
        " framework deleted when the mount expected that, and when it happened.",
    )
    parser.add_argument("name", nargs="*", help=f"all without one: {', '.join(FRAMEWORKS)}")
    names = parser.parse_args().name or list(FRAMEWORKS)
    if unknown := [name for name in names if name not in FRAMEWORKS]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(FRAMEWORKS)}")
    missing = 0
    told: list[Measurement] = []
    for name in names:
        framework = FRAMEWORKS[name]
        if gone := framework.missing():
            print(f"== {framework.title}: not installed: {gone}")
            missing += 1
            continue
        with living(IMAGE_SIZE, ZONE_SIZE) as live:
            told.append(measure(live, framework))
        report(told[-1])
    if len(told) > 1:
        summarise(told)
    return 1 if missing else 0


def report(told: Measurement) -> None:
    print(f"== {told.framework.title}")
    said = ", ".join(f"{name}={value}" for name, value in told.framework.attributes.items())
    table(f"with {said}", told.declared.history)
    table("with no attribute", told.learned.history)
    print(told.shown)
    resets, copied = told.status["zones"]["reset_total"], told.status["copied_bytes"]
    same = [run.trained == run.resumed for run in (told.declared, told.learned)]
    print(f"{resets} zones reset, {copied} bytes copied")
    print(f"the step after resuming is {'bit-equal' if all(same) else 'different'}\n")


def table(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    print(COLUMNS.format("GENERATION", "PREDICTED", "DELETED", "SAVES"))
    for row in rows:
        predicted, late = "-", "-"
        if row["predicted_epoch"] is not None:
            predicted, late = f"{row['predicted_epoch']:.1f}", f"{error(row):+.2f}"
        print(COLUMNS.format(row["number"], predicted, f"{row['deleted_epoch']:.1f}", late))
    print(counted(rows) + "\n")


def counted(rows: list[Row]) -> str:
    known = [row for row in rows if row["predicted_epoch"] is not None]
    near = f", {share(known):.0%} of them within a save" if known else ""
    return f"{len(rows)} deleted, {len(known)} predicted{near}"


def summarise(told: list[Measurement]) -> None:
    print("== Summary")
    for one in told:
        resets, copied = one.status["zones"]["reset_total"], one.status["copied_bytes"]
        print(f"{one.framework.title}: {resets} zones reset, {copied} bytes copied")
        print(f"    with attributes: {counted(one.declared.history)}")
        print(f"    without:         {counted(one.learned.history)}")


if __name__ == "__main__":
    sys.exit(main())
