#!/usr/bin/env python3
"""Compare retainzfs with filesystems of the kernel on a zoned namespace of a virtual machine.

Four trainers save and delete checkpoints, milestones stay, and the same saves are replayed on
each filesystem in turn, on the same namespace of the same guest (scripts/zns-vm): files are
written in pieces of 1 MiB, each is synced and closed, then the save that is no longer kept is
deleted. Milestones are what brings the live bytes to the load, a share of the namespace. What
was written and reset is what the device has counted. In the end each filesystem is mounted anew
and all that must be there is read and compared.

    retainzfs         keep_last on the trainers' directories, anchor on the milestones'
    f2fs              lifetimes by F_SET_RW_HINT; metadata on a conventional namespace of 32 MiB
    btrfs             commit=1
    btrfs-unlimited   the same on a namespace without a limit of active zones
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retainzfs.evaluation.measures import percentile

HERE = Path(__file__).resolve().parent
SYSTEMS = ("retainzfs", "f2fs", "btrfs", "btrfs-unlimited")
ZONE_MIB = 4
ACTIVE = 14
CONVENTIONAL_MIB = 32
MIB = 1 << 20
GUEST_SHARE = "/run/zns-vm/shared"

Record = dict[str, Any]


def run_guest(args: argparse.Namespace, seed: int) -> tuple[list[Record], int]:
    """Replay one seed on all filesystems in one guest; return what it found until it ended, and its
    exit code: 1 when a filesystem failed otherwise than by refusing a save."""
    zones = f"{ZONE_MIB}M"
    with tempfile.TemporaryDirectory(prefix="retainzfs-bench.", dir=args.dir) as share:
        job = {
            "seed": seed,
            "systems": args.systems,
            "loads": args.loads,
            "turnover": args.turnover,
        }
        Path(share, "job").write_text(json.dumps(job))
        results = Path(share, "results")
        results.touch()
        command = [str(HERE / "zns-vm"), "--kernel", args.kernel, "--share", share]
        command += ["--size", f"{args.mib}M", "--zone-size", zones, "--zone-capacity", zones]
        command += ["--max-open", str(ACTIVE), "--max-active", str(ACTIVE)]
        command += ["--namespace", f"{args.mib}M:{zones}:{zones}:0:0"]
        command += ["--conventional", f"{CONVENTIONAL_MIB}M", "--modules", "f2fs,btrfs"]
        command += ["--timeout", str(args.timeout), "--", sys.executable]
        command += [str(HERE / "bench_zoned_guest.py")]
        command += [f"{GUEST_SHARE}/job", f"{GUEST_SHARE}/results"]
        code = subprocess.run(command, check=False, stdout=sys.stderr).returncode
        records = [json.loads(line) for line in results.read_text().splitlines()]
        if code:
            print(f"seed {seed}: the guest ended with exit code {code}", file=sys.stderr)
        return records, code


# Figures


@dataclass(frozen=True)
class Cell:
    """One filesystem at one load: its phases, one for each seed that got so far."""

    phases: list[Record]

    @property
    def done(self) -> list[Record]:
        """Phases in which something was written."""
        return [phase for phase in self.phases if phase["written"]]

    def amplification(self, *devices: str) -> list[float]:
        return [sum(phase[d] for d in devices) / phase["written"] for phase in self.done]

    def resets(self) -> list[float]:
        """Zones reset for each zone that the programs filled."""
        return [phase["resets"] / (phase["written"] / (ZONE_MIB * MIB)) for phase in self.done]


def cells(records: Iterable[Record]) -> dict[tuple[str, float], Cell]:
    phases: dict[tuple[str, float], list[Record]] = defaultdict(list)
    for record in records:
        if record["event"] == "phase" and record["load"] is not None:
            phases[record["system"], record["load"]].append(record)
    return {key: Cell(found) for key, found in phases.items()}


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean and, if they differ, the least and the greatest."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return mean if least == most else f"{mean} ({least} to {most})"


def durable(cell: Cell, reference: Cell) -> tuple[str, str]:
    """Return median and p99 of the seconds until a save was durable, over those of `reference`.

    Compared are the saves that both have made.
    """
    others = {phase["seed"]: phase["durable_s"] for phase in reference.phases}
    ours: list[float] = []
    theirs: list[float] = []
    for phase in cell.phases:
        count = min(len(phase["durable_s"]), len(others.get(phase["seed"], [])))
        ours += phase["durable_s"][:count]
        theirs += others.get(phase["seed"], [])[:count]
    if not ours:
        return "-", "-"
    median = statistics.median(ours) / statistics.median(theirs)
    return f"{median:.2f}", f"{percentile(ours, 0.99) / percentile(theirs, 0.99):.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_load(records: list[Record], systems: list[str], loads: list[float]) -> str:
    found = cells(records)
    rows = []
    for load in loads:
        reference = found.get((systems[0], load), Cell([]))
        for system in systems:
            cell = found.get((system, load), Cell([]))
            asked = sum(phase["asked"] for phase in cell.phases)
            saves = sum(phase["saves"] for phase in cell.phases)
            rows.append(
                [
                    f"{load:.0%}",
                    system,
                    f"{saves} of {asked}" if asked else "not reached",
                    spread(cell.amplification("zoned")),
                    spread(cell.amplification("zoned", "conventional")),
                    spread(cell.resets(), 2),
                    *durable(cell, reference),
                ]
            )
    head = ["load", "filesystem", "saves", "written", "with 2nd device", "resets"]
    return table([*head, "median", "p99"], rows)


def by_system(records: list[Record], systems: list[str], capacity: int) -> str:
    rows = []
    for system in systems:
        own = [record for record in records if record["system"] == system]
        fresh = [r["available"] / capacity for r in own if r["event"] == "fresh"]
        failures = [r["failures"][0] for r in own if r["event"] == "phase" and r["failures"]]
        failures += [r["why"] for r in own if r["event"] == "failed"]
        checks = [record for record in own if record["event"] == "check"]
        wrong = sum(len(check["wrong"]) for check in checks)
        right = sum(check["right"] for check in checks) // MIB
        rows.append(
            [
                system,
                f"{statistics.mean(fresh):.1%}" if fresh else "-",
                "; ".join(failures) or "none",
                (f"{right} MiB, wrong files: {wrong}" if wrong else f"{right} MiB, all right")
                if checks
                else "-",
            ]
        )
    return table(["filesystem", "free when new", "failed", "after a remount"], rows)


EXPLANATION = """\
load: live bytes at the peak, of the namespace. written: bytes written to the zoned namespace for
each byte of the programs; with 2nd device: those to f2fs's conventional one as well. resets: zones
reset for each zone that the programs filled. median, p99: time until a save was durable, in units
of the first filesystem's. failed: the error and the live bytes, of the namespace."""


def report(args: argparse.Namespace, records: list[Record]) -> str:
    seeds = sorted({record["seed"] for record in records})
    return "\n\n".join(
        (
            f"{args.mib} MiB in zones of {ZONE_MIB} MiB, {ACTIVE} open and active at most; kernel"
            f" {args.kernel}; seeds {', '.join(map(str, seeds))}; {args.turnover:g} times the"
            " namespace written at each load",
            by_load(records, args.systems, args.loads),
            by_system(records, args.systems, args.mib * MIB),
            EXPLANATION,
        )
    )


def loads(text: str) -> list[float]:
    values = [int(part) / 100 for part in text.split(",")]
    if not values or values != sorted(values) or not 0 < values[0] <= values[-1] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no rising list of percentages")
    return values


def names(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(SYSTEMS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(SYSTEMS)}")
    return chosen


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench zoned",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="one seed, one load, few saves")
    parser.add_argument("--systems", type=names, default=list(SYSTEMS), metavar="NAME,...")
    parser.add_argument("--loads", type=loads, metavar="PERCENT,...", help="default 60,80,90")
    parser.add_argument("--seeds", type=int, metavar="N", help="default 3")
    parser.add_argument("--turnover", type=float, metavar="X", help="default 0.3")
    parser.add_argument("--mib", type=int, default=512, help="size of the namespace")
    parser.add_argument("--kernel", default="6.1", help="of the guest")
    parser.add_argument("--timeout", type=float, default=2400.0, help="seconds for each seed")
    parser.add_argument("--dir", default=os.environ.get("TMPDIR", "/var/tmp"), help="for the job")
    parser.add_argument("--json", metavar="FILE", help="also write what was measured there")
    args = parser.parse_args(arguments)
    args.loads = args.loads or ([0.6] if args.short else [0.6, 0.8, 0.9])
    args.seeds = args.seeds or (1 if args.short else 3)
    args.turnover = args.turnover or (0.1 if args.short else 0.3)
    return args


def main(arguments: list[str]) -> int:
    """Run the seeds one after another, and print what is known after each."""
    args = parse(arguments)
    records: list[Record] = []
    worst = 0
    for seed in range(1, args.seeds + 1):
        found, code = run_guest(args, seed)
        records += found
        worst = max(worst, code if code > 1 else 0)  # a peer's failure is in the table
        if args.json:
            Path(args.json).write_text("".join(json.dumps(record) + "\n" for record in records))
        print(f"\n{report(args, records)}", flush=True)
    ours = [record for record in records if record["system"] == "retainzfs"]
    checks = [record for record in ours if record["event"] == "check" and not record["wrong"]]
    return worst or int("retainzfs" in args.systems and len(checks) < args.seeds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
