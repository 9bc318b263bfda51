"""hint and gc: what shall be kept, and getting space back now."""

from __future__ import annotations

import argparse
import errno
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from retainzfs import asking, hints
from retainzfs.cli.output import print_json, visible
from retainzfs.errors import MountError, NotYet
from retainzfs.lifetimes import PREFIX, format_size

if TYPE_CHECKING:
    from retainzfs.cli.output import Commands

# Parameters of hints.set() that are options with a value.
VALUES = {
    "keep_last": ("K", "keep the newest K generations"),
    "cadence": ("C", "time between saves: 90s, 30m; learned when not given"),
    "keep_every": ("N", "keep generations whose number is a multiple of N for ever"),
    "file_class": ("C", "checkpoint, cache, scratch or output"),
}
SWITCHES = {
    "anchor": "never retire what is below",
    "reap": "let the filesystem delete retired generations",
}
LATER = {"quota": "S", "reserve": "S", "publish": "RULE"}


def add_commands(commands: Commands) -> None:
    command = commands.add_parser(
        "hint",
        help="show or set what governs a path",
        description="Set attributes of PATH, then show what applies to it and where that is from.",
    )
    command.add_argument("path", metavar="PATH")
    for name, (metavar, text) in VALUES.items():
        command.add_argument(_option(name), metavar=metavar, dest=f"set_{name}", help=text)
    for name, text in SWITCHES.items():
        command.add_argument(
            _option(name), action="store_const", const="1", dest=f"set_{name}", help=text
        )
    for name, metavar in LATER.items():
        command.add_argument(
            _option(name), metavar=metavar, dest=f"set_{name}", help="not supported yet"
        )
    command.add_argument("--clear", action="store_true", help="remove the other attributes of PATH")
    command.add_argument("--json", action="store_true", help="print what applies as JSON")
    command.set_defaults(run=_hint)
    command = commands.add_parser(
        "gc",
        help="reclaim space now",
        description="Reset dead zones and empty half-dead ones; for root and the mounting user.",
    )
    command.add_argument("directory", metavar="DIR")
    command.add_argument("--json", action="store_true", help="print what it did as JSON")
    command.set_defaults(run=_gc)


def _option(name: str) -> str:
    return "--" + name.removeprefix("file_").replace("_", "-")


def _hint(given: argparse.Namespace) -> int:
    for name in LATER:
        if getattr(given, f"set_{name}") is not None:
            raise NotYet(_option(name))
    wanted = {name: getattr(given, f"set_{name}") for name in (*VALUES, *SWITCHES)}
    hints.set(given.path, **wanted)
    if given.clear:
        names = (field.name for field in fields(hints.Attributes))
        hints.clear(given.path, *(name for name in names if wanted.get(name) is None))
    explained = asking.computed(given.path, "explain")
    if given.json:
        print_json(explained)
    else:
        _print_explanation(explained)
    return 0


def _print_explanation(explained: dict[str, Any]) -> None:
    print(visible(explained["path"]))
    for name, attribute in explained["attributes"].items():
        glob = attribute.get("glob")
        if glob is None:
            where = f"set on {visible(attribute['from'])}"
        else:
            where = f"from the configuration ({glob})"
        called = name.removeprefix("file_").removesuffix("_s")  # as the attribute is
        print(f"  {called} = {_shown(name, attribute['value'])}, {where}")
    print(f"  class: {explained['class']}")
    if explained["layout"] is not None:
        print(f"  layout: {explained['layout']}, stream {visible(explained['stream'])}")
    if explained["generation"] is not None:
        print(f"  generation: {explained['generation']}, {explained['state']}")
        print(f"  born at epoch {explained['birth_epoch']:.1f}, retires {_retires(explained)}")
    print(f"  because: {explained['origin']}")


def _retires(explained: dict[str, Any]) -> str:
    if explained["anchor"]:
        return "never"
    epoch = explained["retire_epoch"]
    return "at an unknown epoch" if epoch is None else f"at epoch {epoch:.1f}"


def _shown(name: str, value: Any) -> str:
    if name == "size":
        return format_size(value)
    return f"{value:g} s" if name == "cadence_s" else str(value)


def _gc(given: argparse.Namespace) -> int:
    mount = asking.mount_of(given.directory)
    before = asking.told(mount.directory, "stats.json")
    try:
        os.setxattr(mount.directory, PREFIX + "gc", b"1")
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            what = "only root and the user who mounted it reclaim by hand"
            raise MountError(mount.directory, what) from error
        raise
    if given.json:
        after = asking.told(mount.directory, "stats.json")
        resets = after["zones"]["reset_total"] - before["zones"]["reset_total"]
        copied = after["copied_bytes"] - before["copied_bytes"]
        print_json({"zones_reset": resets, "copied_bytes": copied})
    return 0
