"""Is the default ever worse than zenfs, whatever it is told? One line for each disturbance.

Shown are the default's figures, and how they stand to zenfs's best, as means and at the worst (for
overhead, of the inputs where a setting of zenfs counts; 0.00: of none). The
exit code is 1 if one input breaks the promise (retainzfs/evaluation/robustness.py).

    scripts/robustness --loads 0.7,0.84 --seeds 8
    scripts/robustness --family small --loads 0.7 --saves 80 random interleaved
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from itertools import product
from statistics import mean

from retainzfs.evaluation.disturbance import DISTURBANCES, family
from retainzfs.evaluation.experiment import workers
from retainzfs.evaluation.robustness import Verdict, judge

LOADS = "0.70,0.80,0.84,0.90,0.92"


def verdict(name: str, load: float, seed: int, saves: int) -> Verdict:
    made = family(name)
    return judge(replace(made, saves=saves or made.saves).make(seed, load))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("disturbances", nargs="*", help="all of them by default")
    parser.add_argument("--family", default="paper")
    parser.add_argument("--loads", default=LOADS)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--saves", type=int, default=0, help="default: what the family has")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    names = [f"{arguments.family}+{n}" for n in arguments.disturbances or DISTURBANCES]
    loads = [float(load) for load in arguments.loads.split(",")]
    inputs = list(product(names, loads, range(arguments.seeds), [arguments.saves]))
    print(f"{'':<28}{'':>5}  {'overhead':>8}  {'WA':>6}   overhead / zenfs   WA / zenfs    broken")
    broken = 0
    with workers(arguments.jobs) as pool:
        found = pool.map(verdict, *zip(*inputs, strict=True))
        for name, load in product(names, loads):
            verdicts = [next(found) for _ in range(arguments.seeds)]
            bad = [seed for seed, one in enumerate(verdicts) if not one.holds]
            broken += len(bad)
            overheads = [one.overhead for one in verdicts if one.overhead] or [0.0]
            writes = [one.host_bytes for one in verdicts]
            print(
                f"{name:<28}{load:>5.2f}"
                f"  {mean(one.default.overhead_zones for one in verdicts):>8.2f}"
                f"  {mean(one.default.write_amplification for one in verdicts):>6.3f}"
                f"   {mean(overheads):>5.2f}, {max(overheads):>4.2f} most"
                f"  {mean(writes):>5.3f}, {max(writes):>5.3f} most"
                f"  {' '.join(f'seed {seed}' for seed in bad)}",
                flush=True,
            )
    print(f"{broken} of {len(inputs)} inputs break the promise")
    return broken > 0


if __name__ == "__main__":
    sys.exit(main())
