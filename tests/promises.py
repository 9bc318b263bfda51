"""What a mount promised to programs: written down outside of it, compared with it after a crash.

A record is a file with a JSON line for each of these, about a whole file or a piece of one:

- `doubt`: anything may be there from now on;
- `will`: what was there before, or this;
- `did`: this, and nothing else. Said when the call that promises it has returned.

A line is one write(2), so it is there when its writer has been killed. Whole machines may die while
they write one: then nobody was told that it is there, and it does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ABSENT = ""  # instead of a checksum: there is no such file


class Piece(NamedTuple):
    """`length` bytes at `offset` of a file; a length of -1 means the file as a whole."""

    path: str  # in the mount
    offset: int = 0
    length: int = -1


def checksum(data: bytes | None) -> str:
    return ABSENT if data is None else hashlib.sha256(data).hexdigest()


class Record:
    """Where a program writes down what it is about to do and what was promised to it."""

    def __init__(self, path: Path, root: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._root = root

    def doubt(self, path: Path, data: bytes | None = None, offset: int | None = None) -> None:
        """Of the data only the length counts."""
        self.note("doubt", *self._piece(path, data, offset), ABSENT)

    def will(self, path: Path, data: bytes | None, offset: int | None = None) -> None:
        """None for the data: there will be no such file."""
        self.note("will", *self._piece(path, data, offset), checksum(data))

    def did(self, path: Path, data: bytes | None, offset: int | None = None) -> None:
        self.note("did", *self._piece(path, data, offset), checksum(data))

    def note(self, what: str, *values: object) -> None:
        """Write down something else, for `History.notes`."""
        os.write(self._fd, json.dumps([what, *values]).encode() + b"\n")

    def name(self, path: Path) -> str:
        return str(path.relative_to(self._root))

    def _piece(self, path: Path, data: bytes | None, offset: int | None) -> Piece:
        name = self.name(path)
        return Piece(name) if offset is None else Piece(name, offset, len(data or b""))


@dataclass
class History:
    """What records say about a mount. Read them again as they grow."""

    root: Path
    allowed: dict[Piece, set[str] | None] = field(default_factory=dict)  # None: anything
    notes: list[list[Any]] = field(default_factory=list)
    promised: int = 0  # how often something was
    compared: int = 0  # bytes that were found as they were promised
    _read: dict[Path, int] = field(default_factory=dict)  # bytes of each record

    def read(self, *records: Path) -> None:
        """Take in what the records say since they were last read."""
        for record in records:
            data = record.read_bytes()[self._read.get(record, 0) :] if record.exists() else b""
            data = data[: data.rfind(b"\n") + 1]
            self._read[record] = self._read.get(record, 0) + len(data)
            for line in data.splitlines():
                self._take(json.loads(line))

    def noted(self, what: str) -> list[list[Any]]:
        return [values for kind, *values in self.notes if kind == what]

    def to_json(self) -> dict[str, Any]:
        """Return all that is known, for `from_json`; records are read from their start then."""
        allowed = [[*piece, told and sorted(told)] for piece, told in self.allowed.items()]
        return {"allowed": allowed, "notes": self.notes, "promised": self.promised}

    @classmethod
    def from_json(cls, root: Path, told: dict[str, Any]) -> History:
        pieces = ((Piece(*piece), values) for *piece, values in told["allowed"])
        allowed = {piece: None if values is None else set(values) for piece, values in pieces}
        return cls(root, allowed, told["notes"], told["promised"])

    def _take(self, line: list[Any]) -> None:
        what, *values = line
        if what not in ("doubt", "will", "did"):
            self.notes.append(line)
            return
        piece, told = Piece(*values[:3]), values[3]
        if what == "did":
            self.allowed[piece] = {told}
            self.promised += 1
            return
        before = self.allowed.get(piece) if what == "will" else None
        self.allowed[piece] = None if before is None else before | {told}

    def compare(self) -> list[str]:
        """Return what the mount does not keep. What it holds now, it must hold from now on."""
        broken = []
        contents: dict[str, bytes | None] = {}
        for piece, allowed in self.allowed.items():
            if piece.path not in contents:
                contents[piece.path] = _content(self.root / piece.path)
            data = contents[piece.path]
            if data is not None and piece.length >= 0:
                data = data[piece.offset : piece.offset + piece.length]
            found = checksum(data)
            if allowed is not None and found not in allowed:
                size = "nothing" if data is None else f"{len(data)} other bytes"
                broken.append(f"{piece}: found {size}; {len(allowed)} contents are allowed")
            elif allowed is not None and data is not None:
                self.compared += len(data)
            self.allowed[piece] = {found}
        return broken


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
