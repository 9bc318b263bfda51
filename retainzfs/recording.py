"""Records what a mount saves and deletes, as a trace (docs/replay.md, section Traces).

The mount itself notes every generation when it ends, so however seldom it is asked nothing is
missed; what lives at the end of the recording is asked for then.
"""

from __future__ import annotations

import os
from typing import Any, Final, TextIO

from retainzfs import asking
from retainzfs.errors import MountError
from retainzfs.evaluation import trace

POLL_S: Final = 1.0  # the mount remembers thousands of generations; this is how current a trace is
SOURCE: Final = "trace.json"


class Recorder:
    """A recording from now on, of the streams at and below a directory of a mount.

    Raises NotRetainzfs for another directory, MountError when the mount goes or is made anew.
    """

    def __init__(self, directory: str, out: TextIO) -> None:
        self._mount = asking.mount_of(directory)
        self._directory, self._out = directory, out
        relative = os.path.relpath(os.path.realpath(directory), self._mount.directory)
        self._below = "/" if relative == "." else f"/{relative}/"
        first = self._told()
        self._pid, self._count = first["pid"], first["count"]
        self.generations = 0
        zones = first["zone_capacity"], first["zones"], first["active"]
        out.write(trace.header(first["epoch"], *zones))

    def poll(self) -> dict[str, Any]:
        """Write what has ended since the last time; return what the mount told."""
        told = self._told()
        if told["pid"] != self._pid:
            what = "mounted anew during the recording; what was recorded until then is written"
            raise MountError(self._directory, what)
        missed = told["first"] - self._count - 1
        if missed > 0:
            what = f"{missed} generations ended and were forgotten between two looks"
            raise MountError(self._directory, what)
        fresh = told["count"] - self._count
        self._write(told["ended"][len(told["ended"]) - fresh :])
        self._count = told["count"]
        self._out.flush()
        return told

    def end(self) -> None:
        """Write the rest: what has ended, what lives now, and the last line."""
        told = self.poll()
        self._write(told["living"])
        self._out.write(trace.end(told["epoch"], self.generations))
        self._out.flush()

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = asking.control_file(self._mount, SOURCE)
        return told

    def _write(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["stream"].startswith(self._below):
                self._out.write(trace.line(row))
                self.generations += 1
