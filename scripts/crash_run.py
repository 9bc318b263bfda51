"""Cut the power behind every device operation of random workloads, and check what comes back."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count
from typing import NamedTuple

from tests.simulation import STEPS, Sweep, simulate

SHOWN = 20  # violations that are printed in full
REPORT_S = 10.0  # seconds between two lines of progress


class Result(NamedTuple):
    seed: int
    points: int
    acknowledged: int
    violations: list[str]
    covered: Counter[str]


def swept(seed: int, steps: int, moments: tuple[int, ...] | None = None) -> Result:
    """Run one workload and look at its moments; None: every one."""
    logging.disable(logging.ERROR)  # what workloads provoke
    simulated = simulate(seed, steps)
    sweep = Sweep(simulated, moments).run()
    covered = Counter(f"device {operation.kind}" for operation in simulated.device.history)
    covered.update(simulated.kinds)
    covered.update(simulated.facts)
    return Result(seed, sweep.points, sweep.acknowledged, sweep.violations, covered)


def results(given: argparse.Namespace) -> Iterator[Result]:
    """Yield workloads until enough points were tried."""
    seeds = count(given.seed)
    tried = 0
    with ProcessPoolExecutor(given.jobs) as pool:
        running: set[Future[Result]] = set()
        while tried < given.points:
            while len(running) < given.jobs:
                running.add(pool.submit(swept, next(seeds), given.steps))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                tried += result.points
                yield result
        for future in running:
            yield future.result()


def main() -> int:
    parser = argparse.ArgumentParser(prog="crash", description=__doc__)
    parser.add_argument("--points", type=int, default=100_000, help="cuts to try, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    parser.add_argument("--steps", type=int, default=STEPS, help="operations of a workload's actor")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--cut", type=int, help="look at this one moment of the seed only")
    given = parser.parse_args()
    if given.cut is not None:
        return summary([swept(given.seed, given.steps, (given.cut,))])
    told = started = time.monotonic()
    done: list[Result] = []
    for result in results(given):
        done.append(result)
        for violation in result.violations[:SHOWN]:
            print(violation, flush=True)
        if time.monotonic() - told > REPORT_S:
            told = time.monotonic()
            points = sum(r.points for r in done)
            print(f"{points} points, {points / (told - started):.0f} a second", flush=True)
    return summary(done)


def summary(done: list[Result]) -> int:
    covered: Counter[str] = Counter()
    for result in done:
        covered.update(result.covered)
    violations = [violation for result in done for violation in result.violations]
    if len(done) == 1:
        print(*violations, sep="\n")
    print("covered:", ", ".join(f"{name} {number}" for name, number in sorted(covered.items())))
    print(
        f"workloads: {len(done)}, seeds {min(r.seed for r in done)} to {max(r.seed for r in done)}"
    )
    print(f"points tried: {sum(r.points for r in done)}")
    print(f"acknowledged operations checked: {sum(r.acknowledged for r in done)}")
    print(f"violations: {len(violations)}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
