"""What proc(5) tells about other processes. Every close of a file asks: no pathlib here."""

from __future__ import annotations

import os

# include/linux/sched.h: a process is ending, was killed by a signal.
PF_EXITING, PF_SIGNALED = 0x4, 0x400
READ = 1 << 14  # bytes; more than a process's stat or status ever has


def of_thread(thread: int) -> int:
    """Return the process of a thread, which may end before the process does; 0 if hidden."""
    status = _read(f"/proc/{thread}/status")
    return int(status.partition(b"\nTgid:")[2].split(maxsplit=1)[0]) if status else 0


def ends_badly(pid: int) -> bool:
    """Whether a process is ending by a signal or with an error: then nobody closes its files.

    A process that is gone, or hidden, may have handed its file to another: that says nothing.
    """
    status = _read(f"/proc/{pid}/stat")
    if not status:
        return False
    fields = status.rpartition(b")")[2].split()
    flags, code = int(fields[6]), int(fields[49])  # proc(5): the ninth and the 52nd field
    return bool(flags & PF_SIGNALED or (flags & PF_EXITING and code))


def _read(path: str) -> bytes:
    """Return a file, b"" if it is not there or its process has gone meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, READ)
    except ProcessLookupError:
        return b""
    finally:
        os.close(descriptor)
