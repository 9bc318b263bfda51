"""Run frameworks on a fresh mount each, and print predicted and actual deletions side by side."""

from __future__ import annotations

import argparse
import sys

from tests.conftest import living
from tests.frameworks.catalogue import FRAMEWORKS
from tests.frameworks.measure import IMAGE_SIZE, ZONE_SIZE, Measurement, measure, share

SUMMARY = "{:>7}  {:>8}  {:>10}  {:>6}  {:>6}  {}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/frameworks",
        description="Train with real frameworks on a fresh mount each, with attributes and without,"
        " and show when the mount expected each deletion, and when it happened.",
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
    summarise(told)
    return 1 if missing else 0


def report(told: Measurement) -> None:
    print(f"== {told.framework.title}\n")
    print("\n".join(told.shown))
    same = [run.trained == run.resumed for run in (told.declared, told.learned)]
    print(f"The step after resuming is {'bit-equal' if all(same) else 'different'}.\n")


def summarise(told: list[Measurement]) -> None:
    """Print how many generations each deleted, and what share of them was predicted to a save."""
    print(SUMMARY.format("DELETED", "DECLARED", "LEARNED", "RESETS", "COPIED", "FRAMEWORK"))
    for one in told:
        known = [row for row in one.learned.history if row["predicted_epoch"] is not None]
        print(
            SUMMARY.format(
                len(one.declared.history),
                f"{share(one.declared.history):.0%}",
                f"{share(known):.0%} of {len(known)}",
                one.status["zones"]["reset_total"],
                one.status["copied_bytes"],
                one.framework.title,
            )
        )


if __name__ == "__main__":
    sys.exit(main())
