"""Named places where the process can be made to die, to test what a crash leaves behind.

RETAINZFS_FAILPOINT=NAME[:N] kills the process with SIGKILL when it comes to the place for the Nth
time (N = 1 when not given). Without the variable a place costs one comparison.
"""

from __future__ import annotations

import os
import signal

from retainzfs.errors import UsageError

VARIABLE = "RETAINZFS_FAILPOINT"

PLACES = frozenset(
    {
        "commit-drained",  # the bytes are written, the records not yet
        "commit-flushed",  # the bytes are durable
        "commit-logged",  # the records are written
        "commit-durable",  # the records are durable, nobody was told
        "relocate-staged",  # a zone's live bytes are copied, to memory or further
        "relocate-committed",  # the copies are what counts
        "finish-before",
        "finish-after",
        "reset-before",
        "reset-after",  # the device has reset zones, the journal does not know
        "switch-finished",  # the journal's zone takes no more, the next has not begun
        "switch-reset",  # the next zone is empty
        "switch-written",  # the next zone has its superblock, perhaps not durably
        "snapshot-begun",
        "snapshot-sliced",  # some of its inodes are written
        "snapshot-ended",  # its end is durable, the old one not yet given up
    }
)

_name = ""
_left = 0  # times that the place is still to be passed


def arm(setting: str) -> None:
    """Arm the place that a setting names; an empty one disarms. Raises UsageError."""
    global _name, _left  # one process dies once
    name, _, count = setting.partition(":")
    if name and name not in PLACES:
        raise UsageError(f"{VARIABLE}={setting}: no such place; there are {sorted(PLACES)}")
    if count and not (count.isascii() and count.isdigit() and int(count)):
        raise UsageError(f"{VARIABLE}={setting}: the count is no number from 1 on")
    _name, _left = name, int(count or 1)


def reach(name: str) -> None:
    """Die here, if this is the place and the time."""
    global _left  # noqa: PLW0603
    if name != _name:
        return
    assert name in PLACES, f"{name} is no known place"
    _left -= 1
    if not _left:
        os.kill(os.getpid(), signal.SIGKILL)
