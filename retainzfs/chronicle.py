"""What generations were, noted when they end: from this a trace is recorded (pure).

A generation is noted whole, with the sizes that its files had when they went, so nothing is missed
however short it lived. Notes are numbered: who asks now and then sees whether some were overwritten
meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from retainzfs import layout
from retainzfs.history import stored
from retainzfs.streams import Stream

NOTES_MOST: Final = 4096  # that are remembered, of the latest generations that ended


class Chronicle:
    def __init__(self) -> None:
        self.ended: deque[dict[str, Any]] = deque(maxlen=NOTES_MOST)
        self.count = 0  # generations that ended since the mount
        self._gone: dict[int, list[int]] = {}  # generation → sizes of the files that have left it

    def left(self, generation: int, size: int) -> None:
        """A file has left a generation that goes on, or is being deleted."""
        self._gone.setdefault(generation, []).append(size)

    def forget(self, generation: int) -> None:
        """What has left it until now is no part of it: it was replaced before it was complete."""
        self._gone.pop(generation, None)

    def end(
        self,
        record: layout.GenerationRecord,
        stream: Stream,
        path: str,
        sizes: Iterable[int],
        now: float,
        *,
        reaped: bool,
    ) -> None:
        """A generation is gone; `sizes` are those of the files that it still had."""
        files = [*self._gone.pop(record.generation, []), *sizes]
        row = row_of(record, stream, path, files)
        self.ended.append(row | {"deleted": stored(now), "reaped": reaped})
        self.count += 1


def row_of(
    record: layout.GenerationRecord, stream: Stream, path: str, files: Iterable[int]
) -> dict[str, Any]:
    """Return a generation as a trace has it; `deleted` and `reaped` as for one that lives on.

    `retire` is what was foretold when its first byte was placed: an epoch, "inf" for an anchor,
    null if nothing was.
    """
    predicted, _ = stream.predicted.get(record.generation, (math.nan, ""))
    series = min(stream.series, default=b"").decode("latin-1")
    return {
        "id": record.generation,
        "stream": f"{path.rstrip('/')}/{series}",
        "number": record.number,
        "born": stored(record.birth),
        "files": sorted(files, reverse=True),
        "retire": stored(predicted),
        "complete": record.order > 0,
        "deleted": None,
        "reaped": False,
    }
