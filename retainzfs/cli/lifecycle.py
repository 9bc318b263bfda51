"""mkfs, mount, umount, fsck."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from retainzfs import asking, fsck, mkfs, mounting, repair, unmounting
from retainzfs.cli.output import Progress, print_json, rate_argument, size_argument
from retainzfs.errors import UsageError
from retainzfs.lifetimes import format_size

if TYPE_CHECKING:
    from retainzfs.cli.output import Commands

SIZE_HELP = "K, M, G, T are powers of 1024"


def add_commands(commands: Commands) -> None:
    _add_mkfs(commands)
    _add_mount(commands)
    command = commands.add_parser(
        "umount",
        help="unmount, and wait until everything is written",
        description="Unmount, and wait until everything is on the target."
        " When the mount is busy, say who uses it.",
    )
    command.add_argument("directory", metavar="DIR")
    command.add_argument("--json", action="store_true", help="print what was unmounted as JSON")
    command.set_defaults(run=_umount)
    command = commands.add_parser(
        "fsck",
        help="check an unmounted target",
        description="Check the structure of an unmounted target; without --repair nothing is"
        " changed. Exit code 3 when there is damage.",
    )
    command.add_argument("target", metavar="TARGET")
    command.add_argument(
        "--scrub", action="store_true", help="read everything and verify every checksum"
    )
    command.add_argument(
        "--rate",
        type=rate_argument,
        metavar="R",
        help=f"read so many bytes a second at most with --scrub; {SIZE_HELP}; default: no limit",
    )
    command.add_argument(
        "--repair",
        action="store_true",
        help="put right what can be without losing a byte, behind a copy of the metadata",
    )
    command.add_argument(
        "--backup",
        metavar="FILE",
        help="the copy that --repair makes, a new tar archive; default in this directory",
    )
    command.add_argument("--json", action="store_true", help="print what was found as JSON")
    command.set_defaults(run=_fsck)


def _add_mkfs(commands: Commands) -> None:
    command = commands.add_parser(
        "mkfs",
        help="format a target",
        description="Format an image or a block device. Refuses what holds data without --force.",
    )
    command.add_argument("target", metavar="TARGET")
    command.add_argument(
        "--size", type=size_argument, metavar="S", help=f"of a new image; {SIZE_HELP}"
    )
    command.add_argument(
        "--zone-size", type=size_argument, metavar="S", help="default 64M, less on small images"
    )
    command.add_argument(
        "--zone-capacity", type=size_argument, metavar="S", help="default: the zone size"
    )
    command.add_argument("--max-open", type=int, metavar="N", help="open zones, 0: no limit")
    command.add_argument("--max-active", type=int, metavar="N", help="active zones, 0: no limit")
    command.add_argument(
        "--preallocate", action="store_true", help="take the image's whole size on its host now"
    )
    command.add_argument("--force", action="store_true", help="overwrite what is there")
    command.add_argument("--json", action="store_true", help="print the zones as JSON")
    command.set_defaults(run=_mkfs)


def _add_mount(commands: Commands) -> None:
    command = commands.add_parser(
        "mount",
        help="mount a target",
        description="Mount a target; returns when the mount answers, with a daemon behind it.",
    )
    command.add_argument("target", metavar="TARGET")
    command.add_argument("directory", metavar="DIR")
    command.add_argument(
        "-o",
        action="append",
        default=[],
        metavar="OPTS",
        dest="options",
        help="comma-separated: " + ", ".join(mounting.OWN_OPTIONS) + "; nosuid and the like",
    )
    command.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file: options under [mount], those of -o win; policies for directories under"
        " [[stream]], by glob",
    )
    command.add_argument(
        "--create", action="store_true", help="make and format the image if it is missing"
    )
    command.add_argument(
        "--size",
        type=size_argument,
        metavar="S",
        help=f"of the image that --create makes; {SIZE_HELP}",
    )
    command.add_argument("--foreground", action="store_true", help="stay, and log to the terminal")
    command.add_argument("--log", metavar="FILE", help="where the daemon logs")
    command.add_argument("--verbose", action="store_true", help="log more")
    command.add_argument("--json", action="store_true", help="print what was mounted as JSON")
    command.set_defaults(run=_mount)


def _mkfs(given: argparse.Namespace) -> int:
    geometry = mkfs.make(
        given.target,
        size=given.size,
        zone_size=given.zone_size,
        zone_capacity=given.zone_capacity,
        max_open=given.max_open,
        max_active=given.max_active,
        force=given.force,
        preallocate=given.preallocate,
    )
    if given.json:
        print_json({"target": given.target, **dataclasses.asdict(geometry)})
        return 0
    print(
        f"{given.target}: {geometry.zone_count} zones of {format_size(geometry.zone_size)},"
        f" {format_size(geometry.zone_capacity)} usable each;"
        f" {geometry.max_open or 'any number'} open,"
        f" {geometry.max_active or 'any number'} active at most"
    )
    return 0


def _mount(given: argparse.Namespace) -> int:
    if given.create and given.size is None:
        raise UsageError("--create needs the --size of the image that it makes")
    if given.size is not None and not given.create:
        raise UsageError("--size is for --create; an existing target has its size")
    mount = mounting.Mount(
        mounting.absolute(given.target),
        given.directory,
        mounting.parse_options(given.options, config_file=given.config),
        create_size=given.size,
        log_file=given.log,
        verbose=given.verbose,
    )
    if given.foreground:
        return mounting.mount_foreground(mount)
    mounting.mount_daemon(mount)
    if given.json:
        pid = asking.told(mount.directory, "stats.json")["pid"]
        print_json({"target": mount.target, "directory": mount.directory, "pid": pid})
    return 0


def _umount(given: argparse.Namespace) -> int:
    unmounting.umount(given.directory)
    if given.json:
        print_json({"directory": given.directory})
    return 0


def _fsck(given: argparse.Namespace) -> int:
    if given.rate is not None and not given.scrub:
        raise UsageError("--rate is for --scrub; without it no data are read")
    if given.backup is not None and not given.repair:
        raise UsageError("--backup is for --repair; without it nothing is changed")
    report = _checked(given)
    backup = None
    if given.repair and report.repairable:
        if not given.json:
            _print_report(given.target, report)
        backup = repair.repair(given.target, report, given.backup)
        print(f"{given.target}: repaired; the metadata before are in {backup}", file=sys.stderr)
        report = _checked(given)
    if given.json:
        print_json({**report.as_dict(), "backup": backup})
    else:
        _print_report(given.target, report)
    return 3 if report.damaged else 0


def _checked(given: argparse.Namespace) -> fsck.Report:
    progress = Progress("scrub")
    return fsck.check(given.target, scrub=given.scrub, rate=given.rate, progress=progress)


def _print_report(target: str, report: fsck.Report) -> None:
    for finding in report.findings:
        print(f"{target}: {finding}")
    print(f"{target}: {report.summary()}", file=sys.stderr)
