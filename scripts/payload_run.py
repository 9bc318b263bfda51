#!/usr/bin/env python3
"""Recovers real payloads of SmolLM2-135M's shape, under the retention of two frameworks.

On a fresh mount of an image a job trains a model with random weights on the CPU and saves it as
PyTorch's distributed checkpoint, with AdamW's moments and the generator's state: once under
TorchTitan's CheckpointManager with keep_latest_k=2, once under Megatron's save_checkpoint, which
keeps the newest. The daemon is killed (SIGKILL) when half of the last save has come to it, and the
job with it. The mount is removed, the image checked with every checksum, and mounted again. A new
process restores the newest complete save and trains on: model, moments, generator, and the loss and
state of the next steps have to be, to the bit, those of the job before it died. It repeats the save
that was cut short.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from retainzfs.cli.output import size_argument
from retainzfs.lifetimes.units import format_size
from tests.conftest import living
from tests.frameworks.catalogue import FRAMEWORKS
from tests.frameworks.payload import KEEP, Recovery, recover
from tests.frameworks.smollm import Shape

IMAGE_SIZE = 12 << 30  # sparse; five saves of 1.5 GiB, of which three are there at a time
SAVES_LEAST = 3


def whole(recovery: Recovery) -> bool:
    """Whether all came out as it has to."""
    last = (
        recovery.restored == recovery.acknowledged
        and len(recovery.kept) == KEEP[recovery.framework]
    )
    return last and not recovery.damage and not recovery.differences and recovery.written > 0


def report(recovery: Recovery) -> str:
    states = ", ".join(f"{number} {state}" for number, state in recovery.states)
    same = ", ".join(recovery.differences) or "none"
    rows = [
        ("parameters", f"{recovery.parameters:,}"),
        ("a save", format_size(recovery.save)),
        ("killed after", f"{format_size(recovery.written)} of the last save"),
        ("damage that fsck found", "; ".join(recovery.damage) or "none"),
        ("generations after the next mount", states),
        ("restored", f"step {recovery.restored}, of {recovery.acknowledged} acknowledged"),
        ("differences to the job that was killed", same),
        ("generations in the end", ", ".join(map(str, recovery.kept))),
        ("training until then", f"{recovery.train_seconds:.1f} s"),
        ("mounting after the kill", f"{recovery.mount_seconds:.2f} s"),
        ("restoring, two steps, a save", f"{recovery.resume_seconds:.1f} s"),
    ]
    title = FRAMEWORKS[recovery.framework].title.split(",")[0]
    return "\n".join([f"== {title}", *(f"{what:<40} {value}" for what, value in rows)])


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    shape = Shape()
    parser = argparse.ArgumentParser(
        prog="scripts/payload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("framework", nargs="*", help=f"default: {' '.join(KEEP)}")
    add("--layers", type=int, default=shape.layers, metavar="N", help=f"default {shape.layers}")
    add(
        "--vocabulary",
        type=int,
        default=shape.vocabulary,
        metavar="N",
        help=f"default {shape.vocabulary}",
    )
    add("--saves", type=int, default=5, metavar="N", help="default 5; the last is cut short")
    add("--image-size", type=size_argument, default=IMAGE_SIZE, metavar="SIZE", help="default 12G")
    add("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(arguments)
    args.framework = args.framework or list(KEEP)
    if unknown := [name for name in args.framework if name not in KEEP]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(KEEP)}")
    if min(args.layers, args.vocabulary) < 1 or args.saves < SAVES_LEAST:
        parser.error(f"--layers and --vocabulary are at least 1, --saves at least {SAVES_LEAST}")
    return args


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    found = []
    for name in args.framework:
        with living(args.image_size) as live:
            found.append(recover(live, name, Shape(args.layers, args.vocabulary), args.saves))
        if not args.json:
            print(report(found[-1]), flush=True)
    if args.json:
        print(json.dumps([asdict(recovery) for recovery in found], indent=1))
    return 0 if all(whole(recovery) for recovery in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
