"""Recorded traces: lines of JSON, and the workload that they are (pure).

The format is that of docs/replay.md, section Traces. Sizes are in bytes; times in a trace are
epochs of the mount that was recorded, seconds that it was mounted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final, NamedTuple, NoReturn

from retainzfs.errors import UsageError
from retainzfs.evaluation.workload import BLOCK, WARM_UP, Delete, Save, Stream, Workload
from retainzfs.lifetimes.prediction import E_PER_CADENCE, weighted_median

VERSION: Final = 1
MARK: Final = "retainzfs_trace"  # key of the version, in the first line
TIME_MOST: Final = 1e12  # seconds
TICK: Final = 1e-3  # seconds; times are written so exactly, saves with less between are one
SIZE_MOST: Final = 1 << 60  # bytes
COUNT_MOST: Final = 1 << 32  # zones
WARM_UP_SHARE: Final = 0.25  # of a trace, that is not counted, if that is less than `WARM_UP`


class Generation(NamedTuple):
    stream: str  # directory of the stream, and the names of its generations with # for the number
    number: int
    born: float  # epoch at which the save began
    files: tuple[int, ...]  # bytes of each
    retire: float | None  # foretold when the save began; inf: it was an anchor, None: nothing was
    deleted: float | None  # None: it was there to the end
    complete: bool = True
    reaped: bool = False


@dataclass(frozen=True)
class Trace:
    name: str
    start: float
    end: float
    zone_capacity: int
    zones: int  # for data, of the volume that was recorded
    active: int
    generations: tuple[Generation, ...]


# Writing


def header(start: float, zone_capacity: int, zones: int, active: int) -> str:
    return _line(
        {MARK: VERSION, "start": start}
        | {"zone_capacity": zone_capacity, "zones": zones, "active": active}
    )


def line(row: Mapping[str, Any]) -> str:
    """One generation, as `.retainz/trace.json` tells of it."""
    return _line({name: row[name] for name in Generation._fields})


def end(epoch: float, generations: int) -> str:
    return _line({"end": epoch, "generations": generations})


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":")) + "\n"


# Reading


class _Fields:
    """The fields of one line; complains with file, line and field."""

    def __init__(self, where: str, text: bytes) -> None:
        self.where = where
        try:
            values = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: no JSON: {error}") from error
        if not isinstance(values, dict):
            raise UsageError(f"{where}: no JSON object")
        self.values: dict[str, Any] = values

    def bad(self, name: str, wanted: str) -> NoReturn:
        said = json.dumps(self.values[name])[:60] if name in self.values else "missing"
        raise UsageError(f"{self.where}: {name}: {said}; it is {wanted}")

    def number(self, name: str, least: float = -TIME_MOST) -> float:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.bad(name, "a number")
        if not least <= value <= TIME_MOST:
            self.bad(name, f"a time, {least:g} to {TIME_MOST:g}")
        return float(value)

    def count(self, name: str, most: int, least: int = 0) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.bad(name, f"a whole number, {least} to {most}")
        return value

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if not isinstance(value, bool):
            self.bad(name, "true or false")
        return value


def parse(lines: Iterable[bytes], name: str) -> Trace:
    """Read a trace. Raises UsageError that names line and field.

    Unknown fields are passed over. Without its last line, the recorder was killed, a trace ends
    with the last thing that it tells.
    """
    head: _Fields | None = None
    generations: list[Generation] = []
    ended: float | None = None
    for number, text in enumerate(lines, start=1):
        found = _Fields(f"{name}, line {number}", text)
        if head is None:
            head = found
            _check_version(head)
            start = head.number("start")
        elif ended is not None:
            raise UsageError(f"{found.where}: behind the line that ends the trace")
        elif "end" in found.values:
            ended = found.number("end", start)
            if found.count("generations", SIZE_MOST) != len(generations):
                found.bad("generations", f"{len(generations)}, as many as there are lines of them")
        else:
            generations.append(_generation(found))
    if head is None:
        raise UsageError(f"{name}: empty; record one with 'retainzfs replay record'")
    if not generations:
        raise UsageError(f"{name}: no generation was recorded; there is nothing to replay")
    last = max(max(g.born, g.deleted or -math.inf) for g in generations)
    return Trace(
        name,
        start,
        max(start, last if ended is None else ended),
        head.count("zone_capacity", SIZE_MOST, BLOCK) // BLOCK * BLOCK,
        head.count("zones", COUNT_MOST, 1),
        head.count("active", COUNT_MOST, 1),
        tuple(sorted(generations, key=lambda g: (g.born, g.stream, g.number))),
    )


def _check_version(head: _Fields) -> None:
    if MARK not in head.values:
        raise UsageError(f"{head.where}: {MARK}: missing; this is no trace")
    version = head.count(MARK, COUNT_MOST, 1)
    if version > VERSION:
        text = f"version {version}, this program reads up to {VERSION}; upgrade retainzfs"
        raise UsageError(f"{head.where}: {MARK}: {text}")


def _generation(found: _Fields) -> Generation:
    stream = found.values.get("stream")
    if not isinstance(stream, str) or not stream:
        found.bad("stream", "a path")
    born = found.number("born")
    files = found.values.get("files")
    if not isinstance(files, list) or not all(type(f) is int and f >= 0 for f in files):
        found.bad("files", "a list of sizes in bytes")
    if sum(files) > SIZE_MOST:
        found.bad("files", f"at most {SIZE_MOST} bytes in all")
    retire = found.values.get("retire")
    if retire is not None:
        retire = math.inf if retire == "inf" else found.number("retire")
    deleted = None if found.values.get("deleted") is None else found.number("deleted", born)
    return Generation(
        stream,
        found.count("number", SIZE_MOST),
        born,
        tuple(files),
        retire,
        deleted,
        found.flag("complete"),
        found.flag("reaped"),
    )


# As a workload


class _Taught(NamedTuple):
    """What a stream's own saves and deletions say."""

    cadence: float  # seconds
    keep: int
    deletes: bool  # whether anything was deleted, so that `keep` means something
    size: float


def workload(
    trace: Trace,
    *,
    load: float = 0.84,
    zones: int = 0,
    zone_size: int = 0,
    active: int = 0,
) -> Workload:
    """The saves and deletions of a trace, in epochs of E, a quarter of the byte-weighted median
    cadence. What was there from the beginning is saved at time 0, or is an anchor.

    `zones`: for data; 0: so many that the peak of what lives is the share `load` of them.
    `zone_size`, `active`: 0: those of the volume that was recorded. Where nothing was foretold of a
    generation, its hint is what its stream has taught by the end of the trace.

    Raises UsageError when no bytes were recorded, or more than the zones hold.
    """
    written = [generation for generation in trace.generations if sum(generation.files)]
    if not written:
        raise UsageError(f"{trace.name}: all generations are empty; there is nothing to replay")
    streams = dict.fromkeys(generation.stream for generation in written)
    taught = {s: _teach(trace, [g for g in written if g.stream == s]) for s in streams}
    cadence = weighted_median((each.cadence, each.size) for each in taught.values())
    assert cadence is not None, "a trace has streams"
    unit = cadence / E_PER_CADENCE
    events, anchors = _events(trace, written, taught, unit)
    capacity = (zone_size or trace.zone_capacity) // BLOCK * BLOCK
    peak = sum(anchors) + peak_of(events)
    count = zones or math.ceil(peak / (load * capacity))
    if peak > count * capacity:
        text = f"{peak} bytes live at the peak, {count} zones of {capacity} hold less"
        raise UsageError(f"{trace.name}: {text}; give more --zones")
    over = max((trace.end - trace.start) / unit, events[-1].time if events else 0.0)
    return Workload(
        trace.name,
        capacity,
        count,
        active or trace.active,
        tuple(_stream(trace, written, label, taught[label], unit) for label in streams),
        tuple(anchors),
        tuple(events),
        over + 1.0,
        min(WARM_UP, over * WARM_UP_SHARE),
    )


def peak_of(events: Iterable[Save | Delete]) -> int:
    """Bytes on the device at the time when most of them live."""
    sizes: dict[int, int] = {}
    live = peak = 0
    for event in events:
        if isinstance(event, Save):
            sizes[event.generation] = event.size
            live += event.size
            peak = max(peak, live)
        else:
            live -= sizes[event.generation]
    return peak


def _teach(trace: Trace, generations: list[Generation]) -> _Taught:
    between = [b.born - a.born for a, b in pairwise(generations) if b.born >= a.born + TICK]
    cadence = median(between) if between else max(trace.end - trace.start, 1.0)
    lives = [
        (g.deleted - g.born) / cadence
        for g in generations
        if g.deleted is not None and g.retire != math.inf
    ]
    keep = max(1, round(median(lives))) if lives else len(generations)
    size = sum(sum(g.files) for g in generations) / len(generations)
    return _Taught(cadence, keep, bool(lives), size)


def _stream(
    trace: Trace, written: list[Generation], label: str, taught: _Taught, unit: float
) -> Stream:
    first = next(g.born for g in written if g.stream == label)
    offset = max(0.0, first - trace.start) / unit
    return Stream(taught.keep, taught.cadence / unit, offset, taught.size)


def _events(
    trace: Trace, written: list[Generation], taught: Mapping[str, _Taught], unit: float
) -> tuple[list[Save | Delete], list[int]]:
    labels = list(taught)
    events: list[Save | Delete] = []
    anchors: list[int] = []
    for number, generation in enumerate(written):
        hint = _hint(trace, generation, taught[generation.stream], unit)
        time = max(0.0, generation.born - trace.start) / unit
        index = labels.index(generation.stream)
        save = Save(time, index, number, generation.files, hint)
        if math.isinf(hint) and generation.deleted is None and generation.born < trace.start:
            anchors.append(save.size)
            continue
        events.append(save)
        if generation.deleted is not None:
            gone = max(0.0, generation.deleted - trace.start) / unit
            events.append(Delete(gone, number))
    return sorted(events, key=lambda e: (e.time, isinstance(e, Delete), e.generation)), anchors


def _hint(trace: Trace, generation: Generation, taught: _Taught, unit: float) -> float:
    """In epochs of the workload, no sooner than one behind the save."""
    retire = generation.retire
    if retire is None:
        retire = generation.born + taught.keep * taught.cadence if taught.deletes else math.inf
    saved = max(0.0, generation.born - trace.start) / unit
    return max((retire - trace.start) / unit, saved + 1.0)
