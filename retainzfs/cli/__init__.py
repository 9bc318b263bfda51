"""The `retainzfs` command. Results go to standard output, messages to standard error.

Exit codes: 0 done, 1 the operation failed, 2 wrong usage, 3 a check found damage.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence

from retainzfs import __version__, mounts
from retainzfs.cli import bench, inspect, lifecycle, policy, replay, scrubbing
from retainzfs.errors import RetainzError

INTERRUPTED = 130  # 128 + SIGINT, as a shell has it


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(
        prog="retainzfs",
        description="A filesystem for training checkpoints on zoned storage.",
        epilog="'retainzfs COMMAND --help' tells more about each command.",
    )
    main_parser.add_argument("--version", action="version", version=f"retainzfs {__version__}")
    commands = main_parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (lifecycle, inspect, policy, scrubbing, replay, bench):
        module.add_commands(commands)
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names are bytes, and need be no text
    try:
        code: int = given.run(given)
        sys.stdout.flush()
    except RetainzError as error:
        print(f"retainzfs: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `retainzfs ... | head`: nobody wants the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"retainzfs: {where}{error.strerror}{_advice(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _advice(error: OSError) -> str:
    """What to do about a mount whose daemon has died."""
    if error.errno != errno.ENOTCONN or error.filename is None:
        return ""
    mount = mounts.mount_of(os.fsdecode(error.filename))
    if mount is None:
        return ""
    return f": its daemon has ended; 'retainzfs umount {mount.directory}' takes the mount away"
