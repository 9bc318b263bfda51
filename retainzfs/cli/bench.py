"""`retainzfs bench`: speed on the user's own disk."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from retainzfs.bench import frameworks, picture, pressure, sequential, small
from retainzfs.bench.figures import Sheet
from retainzfs.bench.targets import Bench
from retainzfs.cli.output import check_parent, size_argument
from retainzfs.errors import UsageError
from retainzfs.evaluation import pictures
from retainzfs.lifetimes import format_size

if TYPE_CHECKING:
    from retainzfs.cli.output import Commands

MEASURES: Final[dict[str, Callable[[Bench], None]]] = {
    "write": sequential.bench_write,
    "memory": sequential.bench_memory,
    "pieces": sequential.bench_pieces,
    "writers": sequential.bench_writers,
    "latency": sequential.bench_latency,
    "torch": frameworks.bench_torch,
    "dcp": frameworks.bench_dcp,
    "safetensors": frameworks.bench_safetensors,
    "arrays": frameworks.bench_arrays,
    "tools": small.bench_tools,
    "small": small.bench_small,
    "durable": small.bench_durable,
    "unpack": small.bench_unpack,
    "pressure": pressure.bench_pressure,
    "mount": small.bench_mount,
}
SIZE: Final = 1 << 30
ROOM: Final = 9  # times the size, that a measure takes on the disk at most
REPETITIONS: Final = 5


def add_commands(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed beside other filesystems",
        description="Measures the data path on the disk that DIR is on, beside what else could be "
        f"used there, and prints how they compare. Takes up to {ROOM} times SIZE of room, and "
        "some minutes; nothing is left behind.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="on the disk to measure")
    parser.add_argument("measures", metavar="MEASURE", nargs="*", help="default: all of them")
    parser.add_argument("--size", type=size_argument, default=SIZE, help="of a file (1G)")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="default 5")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    parser.add_argument("--png", metavar="FILE", type=Path, help="also draw the ratios there")
    parser.set_defaults(run=run)


def _epilog() -> str:
    lines = ((name, (measure.__doc__ or "").split("\n\n")[0]) for name, measure in MEASURES.items())
    return "\n".join(f"  {name:<12}{' '.join(text.split())}" for name, text in lines)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when a goal is missed."""
    unknown = [name for name in arguments.measures if name not in MEASURES]
    if unknown:
        raise UsageError(f"no measure {unknown[0]!r}; known: {', '.join(MEASURES)}")
    if arguments.repetitions < 1:
        raise UsageError("--repetitions: at least 1")
    check_parent("--json", arguments.json)
    check_parent("--png", arguments.png)
    if arguments.png:
        pictures.require()
    free = shutil.disk_usage(arguments.directory).free
    if free < ROOM * arguments.size:
        raise UsageError(
            f"{arguments.directory}: {format_size(free)} free, and {ROOM} times --size is needed"
        )
    machine: dict[str, str | int | float | None] = {
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),  # other load spoils the figures
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    sheet = Sheet()
    for name in arguments.measures or MEASURES:
        with tempfile.TemporaryDirectory(
            prefix="retainzfs-bench.", dir=arguments.directory
        ) as work:
            MEASURES[name](Bench(Path(work), arguments.size, arguments.repetitions, sheet))
    if arguments.json:
        figures = [{**asdict(figure), "met": figure.met} for figure in sheet.figures]
        told = {"machine": machine, "figures": figures, "left_out": sheet.left_out}
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    if arguments.png:
        picture.draw(sheet.figures, arguments.png)
    return int(bool(sheet.missed))
