"""A stream: the generations of one job in one directory, and what they have taught (pure)."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from retainzfs import history
from retainzfs.history import History

STORED = b"retainz.streams"
"""The attribute of a directory that keeps what its streams have taught. No user reads or sets it:
it is in none of the namespaces of xattr(7)."""

STORED_MAX = 12 << 10  # bytes; an operation with it fits into the smallest batch

STREAMS_STORED = 64  # no more of them fit

PREDICTED_STORED = 64  # generations whose first hint outlives the mount

MISSED_MOST = 3
"""Saves in a row without a file that the ones before had: then it is no part of a save any more."""


class State(enum.IntEnum):
    DELETED = -1  # the record that ends a generation
    WRITING = 0
    COMPLETE = 1
    INCOMPLETE = 2
    RETIRED = 3  # policy keeps it no longer; of a record: its names are gone, its bytes follow
    PRESUMED = 4  # complete as far as this mount can see: enough for its space, and nothing else

    @property
    def shown(self) -> str:
        """As people are told."""
        return "complete" if self is State.PRESUMED else self.name.lower()


class Outlook(NamedTuple):
    """What is expected of a stream, without regard to the time. Seconds, inf where not known."""

    last: float  # birth of its newest generation
    every: float  # cadence
    lifetime: float  # of what is saved next, until it retires; inf: it has no retirement
    anchors: bool  # whether some of its generations will be anchors


@dataclass(slots=True)
class Stream:
    ino: int  # of the directory; of a file that is a generation by itself
    series: set[bytes] = field(default_factory=set)  # of the names that belong to it
    numbers: dict[int, int] = field(default_factory=dict)  # number → generation
    history: History = field(default_factory=History)
    size: int = 0  # of the newest complete generation
    files: int = 0  # that it has
    stems: dict[bytes, int] = field(default_factory=dict)  # of single files → the last size
    companions: set[bytes] = field(default_factory=set)  # stems of the newest complete generation
    missed: dict[bytes, int] = field(default_factory=dict)  # stem → saves in a row without it
    stale: int = 0  # saves since the retirements of all generations were looked at
    marked: bool = False  # there was strong evidence of completeness, so weaker counts for nothing
    sighted: bool = False  # it shows by its deletions alone that it is one
    # Generation → retirement, and why, as they were when its first byte was placed.
    predicted: dict[int, tuple[float, str]] = field(default_factory=dict)
    outlook: Outlook | None = None  # None: to be looked up again

    @property
    def newest(self) -> int | None:
        """The number of the generation that was born last."""
        return max(self.numbers, key=self.numbers.__getitem__, default=None)

    def missing(self, stems: set[bytes]) -> set[bytes]:
        """Return the files that the generation before had and this one has not."""
        return {stem for stem in self.companions - stems if self.missed.get(stem, 0) < MISSED_MOST}

    def encode(self) -> dict[str, Any]:
        """Return what outlives the mount, for `json`."""
        predicted = list(self.predicted.items())[-PREDICTED_STORED:]
        return {
            "series": sorted(map(_text, self.series)),
            "size": self.size,
            "stems": {_text(stem): size for stem, size in self.stems.items()},
            "companions": sorted(map(_text, self.companions)),
            "missed": {_text(stem): count for stem, count in self.missed.items()},
            "marked": self.marked,
            "sighted": self.sighted,
            "predicted": {str(g): [history.stored(epoch), why] for g, (epoch, why) in predicted},
            **self.history.encode(),
        }

    @classmethod
    def decode(cls, ino: int, told: Any) -> Stream:
        """Raises ValueError for what `encode` did not write."""
        taught = History.decode(told)
        try:
            return cls(
                ino,
                {_name(text) for text in told["series"]},
                history=taught,
                size=int(told["size"]),
                stems={_name(text): int(size) for text, size in told["stems"].items()},
                companions={_name(text) for text in told["companions"]},
                missed={_name(text): int(count) for text, count in told["missed"].items()},
                marked=bool(told["marked"]),
                sighted=bool(told.get("sighted", False)),
                predicted={
                    int(g): (history.told(epoch), str(why))
                    for g, (epoch, why) in told["predicted"].items()
                },
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no stream: {error}") from error


def dumps(streams: list[Stream]) -> bytes:
    """Return the streams of a directory as they are stored, at most STORED_MAX bytes.

    Of a directory with many jobs that is what hints are made of; of one with very many the newest.
    """
    streams = streams[-STREAMS_STORED:]
    told = [stream.encode() for stream in streams]
    stored = _compact(told)
    if len(stored) > STORED_MAX:
        told = [one | {"ended": [], "predicted": {}} for one in told]
        stored = _compact(told)
    while len(stored) > STORED_MAX:
        told = told[len(told) // 2 + 1 :]
        stored = _compact(told)
    return stored


def _compact(told: list[dict[str, Any]]) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode()


def loads(ino: int, stored: bytes) -> list[Stream]:
    """Return the streams of a directory. What cannot be read taught nothing: it costs placement
    quality, and refusing the mount would cost the data."""
    try:
        return [Stream.decode(ino, told) for told in json.loads(stored)]
    except (ValueError, TypeError, OverflowError, RecursionError):
        return []


def _text(name: bytes) -> str:
    return name.decode("latin-1")


def _name(text: str) -> bytes:
    return text.encode("latin-1")
