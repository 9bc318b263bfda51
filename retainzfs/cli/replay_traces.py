"""replay record and replay run: what a mount saved and deleted, and policies over that."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from retainzfs.cli.output import print_json, print_table, size_argument
from retainzfs.cli.replay_device import check_without_device, device_options, run_on_device
from retainzfs.errors import UsageError
from retainzfs.evaluation import tables, trace
from retainzfs.evaluation.experiment import Cell, Setting, check_zones, ways
from retainzfs.evaluation.measures import Result
from retainzfs.evaluation.simulator import Simulator
from retainzfs.evaluation.workload import Workload
from retainzfs.placement.admission import RULES
from retainzfs.recording import POLL_S, Recorder
from retainzfs.replay_target import suited

if TYPE_CHECKING:
    from retainzfs.cli.output import Commands

LOAD = 0.84


def add_commands(commands: Commands) -> None:
    """Add `record` and `run` below `replay`."""
    command = commands.add_parser(
        "record",
        help="record what a mount saves and deletes",
        description="Record the generations at and below DIR, on a mount, until Ctrl-C: when each"
        " was saved and deleted, the sizes of its files, and what was foretold of it. No content is"
        " recorded, and of names only that of the stream.",
    )
    command.add_argument("directory", metavar="DIR")
    command.add_argument("--out", metavar="FILE", type=Path, help="default standard output")
    command.add_argument(
        "--seconds", metavar="N", type=_seconds, help="stop by itself, not only at Ctrl-C"
    )
    command.set_defaults(run=_record)
    command = commands.add_parser(
        "run",
        help="run placement policies over a recorded trace",
        description="Run placement policies over a trace that 'retainzfs replay record' wrote, in"
        " simulated time.",
    )
    command.add_argument("trace", metavar="TRACE", type=Path)
    command.add_argument(
        "--policy", action="append", metavar="NAME", help="default plan; may be repeated"
    )
    command.add_argument(
        "--admission", default="", metavar="RULE", help=f"{', '.join(RULES)}; default the policy's"
    )
    size = command.add_mutually_exclusive_group()
    size.add_argument(
        "--load",
        type=float,
        default=LOAD,
        metavar="SHARE",
        help="of the zones, that lives at the peak; says how many there are, default %(default)s",
    )
    size.add_argument("--zones", type=int, default=0, metavar="N", help="zones for data")
    command.add_argument(
        "--zone-size", type=size_argument, default=0, metavar="S", help="default: as recorded"
    )
    command.add_argument(
        "--active", type=int, default=0, metavar="N", help="zones for data; default: as recorded"
    )
    device_options(command, saves=False)
    command.add_argument("--json", action="store_true", help="print all figures as JSON")
    command.set_defaults(run=_run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < trace.TIME_MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


# record


def _record(given: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        out = sys.stdout
        if given.out is not None:
            out = stack.enter_context(given.out.open("w"))
        recorder = Recorder(given.directory, out)
        stopped = stack.enter_context(_stopping())
        until = "" if given.seconds is None else f" or {given.seconds:g} s are over"
        print(f"recording {given.directory} until Ctrl-C{until}", file=sys.stderr)
        deadline = time.monotonic() + (math.inf if given.seconds is None else given.seconds)
        while not stopped.wait(max(0.0, min(POLL_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                break
            recorder.poll()
        recorder.end()
    print(f"{recorder.generations} generations recorded", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event; an exception in the middle of a line would spoil it."""
    stopped = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda *_: stopped.set()) for each in signals]
    try:
        yield stopped
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


# run


def _run(given: argparse.Namespace) -> int:
    with given.trace.open("rb") as lines:
        recorded = trace.parse(lines, str(given.trace))
    workload = _workload(recorded, given)
    load = _load(workload)
    asked = [
        Setting(
            name,
            str(given.trace),
            load,
            given.admission,
            active=workload.active,
            zone_size=workload.capacity,
        )
        for name in given.policy or ["plan"]
    ]
    for setting in asked:
        ways(setting)
    if given.device is None:
        check_without_device(given)
        cells = {s: Cell(s, {0: _simulated(s, workload)}) for s in asked}
    else:
        cells = run_on_device(
            given.device, asked, [0], lambda _setting, _seed: workload, force=given.force
        )
    _report(workload, cells, as_json=given.json)
    return 0


def _workload(recorded: trace.Trace, given: argparse.Namespace) -> Workload:
    """Raises UsageError for zones that cannot be."""
    size, active = given.zone_size or recorded.zone_capacity, given.active or recorded.active
    check_zones(given.load, active, size)
    if given.zones < 0:
        raise UsageError(f"--zones {given.zones}: give 1 or more")
    most = trace.COUNT_MOST
    own = None if given.device is None else suited(given.device, most, active, given.zone_size)
    if own is not None:
        size, most, active = own
    made = trace.workload(
        recorded, load=given.load, zones=given.zones, zone_size=size, active=active
    )
    if own is not None and made.zones > most:
        raise UsageError(f"{given.device}: {most} zones for data, {made.zones} are wanted")
    return made


def _load(workload: Workload) -> float:
    peak = sum(workload.anchors) + trace.peak_of(workload.events)
    return peak / (workload.zones * workload.capacity)


def _simulated(setting: Setting, workload: Workload) -> Result:
    policy, rule, rank = ways(setting)
    return Simulator(workload, policy, rule, rank=rank).run()


def _report(workload: Workload, cells: Mapping[Setting, Cell], *, as_json: bool) -> None:
    if as_json:
        print_json([cell.as_json() | {"zones": workload.zones} for cell in cells.values()])
        return
    heads = ["POLICY", "ZONES", "LOAD", *tables.HEADS]
    rows = [
        [setting.label, f"{workload.zones}", f"{setting.load:.2f}", *tables.columns(cell)]
        for setting, cell in cells.items()
    ]
    print_table(heads, rows, right=" ".join(heads[1:]))
