"""status, zones, generations: what a mounted filesystem tells about itself."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from retainzfs import asking, mounts
from retainzfs.cli import zonemap
from retainzfs.cli.output import print_json, print_table
from retainzfs.errors import MountError
from retainzfs.lifetimes import format_size

if TYPE_CHECKING:
    from retainzfs.cli.output import Commands


def add_commands(commands: Commands) -> None:
    command = commands.add_parser(
        "status",
        help="capacity, zones, write amplification, streams",
        description="Show how a mount is doing; without DIR, every mount of retainzfs.",
    )
    command.add_argument("directory", metavar="DIR", nargs="?")
    _finish(command, _status)
    command = commands.add_parser(
        "zones",
        help="the map of the zones",
        description="Show every zone of a mount: its class, and how full it is.",
    )
    command.add_argument("directory", metavar="DIR")
    _finish(command, _zones)
    command = commands.add_parser(
        "generations",
        help="the generations of a stream",
        description="List the generations of the streams at and below PATH.",
    )
    command.add_argument("path", metavar="PATH")
    command.add_argument(
        "--history",
        action="store_true",
        help="list those that were deleted instead: what was foretold, and what happened",
    )
    _finish(command, _generations)


def _finish(command: argparse.ArgumentParser, run: Any) -> None:
    command.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")
    command.set_defaults(run=run)


def _status(given: argparse.Namespace) -> int:
    if given.directory is not None:
        status = asking.told(given.directory, "stats.json")
        print_json(status) if given.json else _print_status(status)
        return 0
    ours = list(mounts.ours())
    all_status = []
    for mount in ours:
        try:
            all_status.append(asking.control_file(mount, "stats.json"))
        except MountError as error:  # the others are well all the same
            print(f"retainzfs: {error}", file=sys.stderr)
    if given.json:
        print_json(all_status)
    else:
        for number, status in enumerate(all_status):
            if number:
                print()
            _print_status(status)
    if not ours:
        print("retainzfs: nothing is mounted", file=sys.stderr)
    return int(len(all_status) < len(ours))


def _print_status(status: dict[str, Any]) -> None:
    zones = status["zones"]
    amplification = status["write_amplification"]
    rows = [
        ("target", status["target"]),
        ("policy", status["policy"]),
        ("capacity", f"{format_size(status['capacity'])}, {_share(status)}"),
        ("free", format_size(status["free"])),
        ("dead", f"{format_size(status['dead'])} to reclaim"),
        ("tail", f"{format_size(status['tail'])} unwritten in zones in use"),
        (
            "zones",
            f"{zones['empty']} empty, {zones['full']} full, {zones['active']} active,"
            f" {zones['open']} open, of {format_size(zones['capacity'])};"
            f" {zones['reset_total']} resets",
        ),
        (
            "written",
            f"{format_size(status['logical_bytes'])} by programs,"
            f" {format_size(status['host_bytes'])} to the device,"
            f" {format_size(status['copied_bytes'])} of it copies",
        ),
        (
            "write amplification",
            "nothing written yet" if amplification is None else f"{amplification:.3f}",
        ),
    ]
    if status["decision_us"] is not None:
        rows.append(("placement", f"{status['decision_us']:.0f} us a decision"))
    rows += _troubles(status)
    scrub = status["scrub"]
    if scrub["state"] != "never":
        rows.append(
            (
                "scrub",
                f"{scrub['state']}, {format_size(scrub['done'])} of {format_size(scrub['total'])},"
                f" {scrub['damaged']} damages found",
            )
        )
    errors = status["checksum_errors"] + status["read_errors"]
    if errors:
        rows.insert(0, ("DAMAGED", f"{errors} reads failed; the log names the files"))
    if status["failed"] is not None:
        rows.insert(0, ("FAILED", status["failed"]))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}")
    classes = {k: v for k, v in status["classes"].items() if v["files"]}
    if classes:
        print()
        table = [(k, str(v["files"]), format_size(v["bytes"])) for k, v in classes.items()]
        print_table(("CLASS", "FILES", "SIZE"), table, right="FILES SIZE")
    if status["streams"]:
        print()
        _print_streams(status["streams"])


def _troubles(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a sound device has nothing of."""
    zones = status["zones"]
    counts = (
        (status["write_errors"], "writes failed and went elsewhere"),
        (zones["read_only"], "zones read-only"),
        (zones["offline"], "zones offline"),
    )
    text = ", ".join(f"{count} {what}" for count, what in counts if count)
    return [("trouble", f"{text}; see the log")] if text else []


def _share(status: dict[str, Any]) -> str:
    used = status["used"]
    return f"{format_size(used)} ({used / (status['capacity'] or 1):.1%}) used"


def _print_streams(streams: list[dict[str, Any]]) -> None:
    paths = Counter(stream["path"] for stream in streams)
    rows = [
        (
            stream["path"] if paths[stream["path"]] == 1 else _job(stream),
            str(stream["generations"]),
            str(stream["complete"]),
            _or_dash(stream["newest_committed"]),
            _or_dash(stream["newest_published"]),
            "-" if stream["cadence_s"] is None else f"{stream['cadence_s']:.3g} s",
            format_size(stream["size"]),
        )
        for stream in streams
    ]
    heads = ("STREAM", "SAVES", "COMPLETE", "NEWEST", "PUBLISHED", "CADENCE", "SIZE")
    print_table(heads, rows, right="SAVES COMPLETE NEWEST PUBLISHED CADENCE SIZE")


def _job(stream: dict[str, Any]) -> str:
    """One of several streams in a directory, by what its names have beside the number."""
    return f"{stream['path']} ({', '.join(stream['names'])})"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _zones(given: argparse.Namespace) -> int:
    zones = asking.told(given.directory, "zones.json")
    if given.json:
        print_json(zones)
        return 0
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for line in zonemap.drawn(zones, zonemap.terminal_width(), coloured=coloured):
        print(line)
    return 0


def _generations(given: argparse.Namespace) -> int:
    if given.history:
        return _history(given)
    rows = asking.generations(given.path)
    if given.json:
        print_json(rows)
        return 0
    table = [
        (
            str(row["number"]),
            row["state"],
            format_size(row["size"]),
            f"{row['birth_epoch']:.1f}",
            "never" if row["anchor"] else _epoch(row["retire_epoch"]),
            str(len(row["zones"])),
            row["path"],
            row["origin"],
        )
        for row in rows
    ]
    heads = ("NUMBER", "STATE", "SIZE", "BORN", "RETIRES", "ZONES", "PATH", "BECAUSE")
    print_table(heads, table, right="NUMBER SIZE BORN RETIRES ZONES")
    if not rows:
        print(f"retainzfs: {given.path}: {_why_none(given.path)}", file=sys.stderr)
    return 0


def _why_none(path: str) -> str:
    told = asking.computed(path, "explain")
    if told["generation"] is None:
        return "no generations there"
    stream = told["stream"] or told["path"]
    return (
        f"no generations below; it belongs to generation {told['generation']} of {stream},"
        " which lists them; 'retainzfs hint' tells about one"
    )


def _history(given: argparse.Namespace) -> int:
    rows = asking.computed(given.path, "history")
    if given.json:
        print_json(rows)
        return 0
    table = [
        (
            row["stream"],
            str(row["number"]),
            f"{row['birth_epoch']:.1f}",
            "never" if row["anchor"] else _epoch(row["predicted_epoch"]),
            f"{row['deleted_epoch']:.1f}",
            _saves(row["saves_predicted"]),
            _saves(row["saves"]),
            row["origin"],
        )
        for row in rows
    ]
    heads = ("STREAM", "NUMBER", "BORN", "FORETOLD", "DELETED", "SAVES", "REALLY", "BECAUSE")
    print_table(heads, table, right="NUMBER BORN FORETOLD DELETED SAVES REALLY")
    foretold = [row for row in rows if row["saves"] is not None and row["saves_predicted"]]
    near = sum(abs(row["saves"] - row["saves_predicted"]) <= 1 for row in foretold)
    if not rows:
        print(f"retainzfs: {given.path}: no deleted generations known there", file=sys.stderr)
        return 0
    print(f"{len(rows)} deleted, {len(foretold)} of them foretold, {near} within one save")
    return 0


def _saves(saves: float | None) -> str:
    return "-" if saves is None else f"{saves:.2f}"


def _epoch(epoch: float | None) -> str:
    return "unknown" if epoch is None else f"{epoch:.1f}"
