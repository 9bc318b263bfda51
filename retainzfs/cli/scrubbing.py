"""scrub: verify every checksum of a mounted filesystem."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from retainzfs import asking, scrub
from retainzfs.cli.output import Progress, print_json, rate_argument
from retainzfs.errors import MountError
from retainzfs.extents import Damage
from retainzfs.lifetimes import PREFIX, format_size

if TYPE_CHECKING:
    from retainzfs.cli.output import Commands

LOOK_S = 0.2  # between two looks at how far it is; what a person sees as at once


def add_commands(commands: Commands) -> None:
    command = commands.add_parser(
        "scrub",
        help="verify every checksum of a mount",
        description="Read what files hold and verify every checksum while the filesystem is in"
        " use; for root and the mounting user. Exit code 3 when there is damage; ^C stops it.",
    )
    command.add_argument("directory", metavar="DIR")
    command.add_argument(
        "--rate",
        type=rate_argument,
        metavar="R",
        help=f"bytes to read a second at most, default {format_size(scrub.RATE)}",
    )
    command.add_argument("--stop", action="store_true", help="end the scrub that runs")
    command.add_argument("--json", action="store_true", help="print what was found as JSON")
    command.set_defaults(run=_scrub)


def _scrub(given: argparse.Namespace) -> int:
    directory = asking.mount_of(given.directory).directory
    if given.stop:
        _order(directory, "stop")
        return 0
    _order(directory, "start" if given.rate is None else str(given.rate))
    try:
        report = _end_of(directory)
    except KeyboardInterrupt:
        _order(directory, "stop")
        raise
    findings = [Damage(**finding) for finding in report["findings"]]
    if given.json:
        print_json(report)
    else:
        for damage in findings:
            print(damage)
        count = f"{len(findings)} damages found" if findings else "no damage"
        print(f"{directory}: {format_size(report['total'])} read, {count}", file=sys.stderr)
    if report["state"] == "stopped":
        raise MountError(directory, "the scrub was stopped before its end")
    return 3 if findings else 0


def _order(directory: str, value: str) -> None:
    try:
        os.setxattr(directory, PREFIX + "scrub", value.encode())
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            what = "only root and the user who mounted it scrub"
            raise MountError(directory, what) from error
        if error.errno == errno.EBUSY:
            what = "a scrub is running already; 'retainzfs status' shows it, --stop ends it"
            raise MountError(directory, what) from error
        raise


def _end_of(directory: str) -> dict[str, Any]:
    """Return the report of the scrub when it has ended; show how far it is until then."""
    progress = Progress("scrub")
    while True:
        report: dict[str, Any] = asking.told(directory, "scrub.json")
        if report["total"]:
            progress(report["done"], report["total"])
        if report["state"] != "running":
            return report
        time.sleep(LOOK_S)
