"""Unmounting: let the kernel go, wait until the daemon has written everything out."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import subprocess
from pathlib import Path

from retainzfs import mounts
from retainzfs.errors import MountBusy, MountError

log = logging.getLogger(__name__)


def detach(directory: str, *, lazy: bool = False) -> None:
    """Unmount in the kernel only. With `lazy` it disappears even while it is used.

    Raises MountBusy with the processes that use it, or MountError.
    """
    path = os.path.realpath(directory)
    if os.geteuid() == 0:
        # Neither helpers (this may be one) nor a look at the directory (it may be dead).
        command = ["umount", "--internal-only", "--no-canonicalize"]
        command += ["--lazy"] if lazy else []
    else:
        command = ["fusermount3", "-u", *(["-z"] if lazy else [])]
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            [*command, path],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise MountError(directory, f"{command[0]} is not installed") from error
    if done.returncode == 0:
        return
    if "busy" not in done.stderr:
        raise MountError(directory, f"cannot unmount: {done.stderr.strip()}")
    users = mounts.users(path)
    shown = [str(user) for user in users[: mounts.USERS_SHOWN]]
    if len(users) > mounts.USERS_SHOWN:
        shown.append(f"and {len(users) - mounts.USERS_SHOWN} more")
    raise MountBusy(directory, "; ".join(shown) or "a process that you may not look at")


def umount(directory: str) -> None:
    """Unmount and return when everything is on the target and the daemon has ended.

    A dead mount is taken away too. Raises MountBusy or MountError, the latter also after the
    unmount of a volume that could not write everything.
    """
    mount = mounts.find_mount(os.path.realpath(directory))
    if mount is None or mount.fstype != mounts.FSTYPE:
        raise MountError(directory, "no retainzfs is mounted there")
    failure = _sync(directory)
    daemon, stopped = _daemon(directory)
    if stopped is not None:
        failure = f"it could not write any more: {stopped}"
    try:
        detach(directory)
        if daemon >= 0:
            wait(daemon)
    finally:
        if daemon >= 0:
            os.close(daemon)
    if failure is not None:
        raise MountError(directory, f"unmounted, but {failure}")


def _sync(directory: str) -> str | None:
    """Write everything out while errors still reach somebody; return what went wrong."""
    try:
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(root)
        finally:
            os.close(root)
    except OSError as error:
        if error.errno in (errno.EIO, errno.EROFS, errno.ENOSPC):
            return "not everything could be written; its log says which files"
        log.debug("%s: cannot sync: %s", directory, error)  # dead, or not ours to look into
    return None


def _daemon(directory: str) -> tuple[int, str | None]:
    """Return a descriptor of the daemon's process (pidfd_open(2)), -1 if there is none; and the
    error that stopped its volume."""
    try:
        told = json.loads(Path(directory, ".retainz/stats.json").read_bytes())
        return os.pidfd_open(told["pid"]), told["failed"]
    except (OSError, ValueError) as error:
        log.debug("%s: no daemon to wait for: %s", directory, error)
        return -1, None


def wait(daemon: int, timeout_s: float | None = None) -> None:
    """Return when the process behind a pidfd has ended. Raises TimeoutError."""
    poll = select.poll()
    poll.register(daemon, select.POLLIN)
    if not poll.poll(None if timeout_s is None else timeout_s * 1000):
        raise TimeoutError(f"a daemon goes on after {timeout_s:g} s")
