"""What people are told of generations: the table of a stream, and why a hint applies."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from retainzfs import layout, lifetimes
from retainzfs.chronicle import row_of
from retainzfs.contexts import Context
from retainzfs.history import Ended
from retainzfs.lifetimes import FileClass, Layout
from retainzfs.namespace import Inode
from retainzfs.retention import Retention
from retainzfs.streams import State, Stream
from retainzfs.zones import ZoneTable


def _streams(retention: Retention, ino: int) -> Iterator[Stream]:
    """Yield the streams at and below a directory."""
    namespace = retention.namespace
    for stream in sorted(retention.all_streams(), key=lambda s: s.ino):
        inode = namespace.inodes.get(stream.ino)
        if inode is None or namespace.removed(inode):
            continue
        if namespace.below(inode, ino):
            yield stream


def table(retention: Retention, zones: ZoneTable, ino: int) -> list[dict[str, Any]]:
    """Return the rows of `generations --json` for the streams at and below a directory."""
    rows: list[dict[str, Any]] = []
    path = cache(partial(_path, retention))
    for stream in _streams(retention, ino):
        retired = _retired(retention, stream)
        kept = retention.kept(stream) if retired else {}
        for _, generation in sorted(stream.numbers.items()):
            record = retention.namespace.generations[generation]
            row = _row(retention, zones, record, path)
            if generation in retired and generation not in kept:
                row["state"] = State.RETIRED.shown
            if generation in retired and generation in kept:
                row["origin"] += f"; kept: {kept[generation]}"
            rows.append(row)
    return rows


def history(retention: Retention, ino: int) -> list[dict[str, Any]]:
    """Return the latest generations that were deleted, of the streams at and below a directory:
    what was foretold when their first bytes were placed, and what happened."""
    streams = list(_streams(retention, ino))
    rows = [_past(retention, stream, one) for stream in streams for one in stream.history.ended]
    return sorted(rows, key=lambda row: row["deleted_epoch"])


def chronicle(retention: Retention) -> dict[str, Any]:
    """Return what a trace is recorded from: the latest generations that ended, numbered `first` to
    `count`, and those that live. Times are epochs; `epoch` is now."""
    namespace = retention.namespace
    ended = retention.chronicle.ended
    living = [
        row_of(record, stream, namespace.path(stream.ino), retention.sizes(record.generation))
        for stream in retention.all_streams()
        if stream.ino in namespace.inodes
        for record in retention.records(stream)
    ]
    return {
        "epoch": retention.now_s(),
        "first": retention.chronicle.count - len(ended) + 1,
        "count": retention.chronicle.count,
        "ended": list(ended),
        "living": living,
    }


def _past(retention: Retention, stream: Stream, ended: Ended) -> dict[str, Any]:
    return {
        "stream": retention.namespace.path(stream.ino),
        "number": ended.number,
        "birth_epoch": ended.birth,
        "predicted_epoch": _finite(ended.predicted),
        "anchor": math.isinf(ended.predicted),
        "origin": ended.origin,
        "deleted_epoch": ended.deleted,
        "saves": _finite(ended.saves),
        "saves_predicted": _finite(ended.saves_predicted),
        "reaped": ended.reaped,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _retired(retention: Retention, stream: Stream) -> set[int]:
    """Return the complete generations that policy keeps no longer.

    Under keep_last that are those with K newer commits; the epochs are predictions. Only a
    retirement that was stated as an epoch is one.
    """
    counted = retention.counted(stream)
    keep = retention.policy_of(retention.namespace.get(stream.ino)).keep_last
    late = [r for r in counted if r.retire <= retention.now_s()]
    beyond = counted[keep:] if keep is not None else []
    stated = [r for r in late if r.origin.startswith(b"retire=")]
    return {r.generation for r in (*beyond, *stated) if math.isfinite(r.retire)}


def _path(retention: Retention, record: layout.GenerationRecord) -> str:
    namespace = retention.namespace
    for directory, name in retention.names_of(record.generation)[:1]:
        return os.path.join(namespace.path(directory), os.fsdecode(name))
    return namespace.path(record.stream)


def _row(
    retention: Retention,
    table: ZoneTable,
    record: layout.GenerationRecord,
    path: Callable[[layout.GenerationRecord], str],
) -> dict[str, Any]:
    namespace = retention.namespace
    inodes = [namespace.get(i) for i in retention.members.get(record.generation, ())]
    zones = {e.run.zone for i in inodes for e in i.extents if e.run.zone >= 0}
    # A damaged image may name zones that are not there.
    beside = {g for zone in zones if zone < len(table.zones) for g in table[zone].live}
    others = [namespace.generations.get(g) for g in beside - {record.generation}]
    return {
        "number": record.number,
        "path": path(record),
        "state": State(record.state).shown,
        "size": sum(i.size for i in inodes),
        "birth_epoch": record.birth,
        "retire_epoch": _finite(record.retire),
        "anchor": math.isinf(record.retire),
        "origin": record.origin.decode(errors="replace"),
        "reason": retention.reasons.get(record.generation),
        "presumed": record.state == State.PRESUMED,
        "zones": sorted(zones),
        "shared_with": sorted(path(other) for other in others if other is not None),
        "published": None,
    }


def explain(retention: Retention, inode: Inode) -> dict[str, Any]:
    """Return what `hint PATH` shows: what applies, and where it was found."""
    namespace = retention.namespace
    name = b"" if inode.is_dir else (namespace.components(inode.ino) or [b""])[-1]
    context = retention.context(inode.ino if inode.is_dir else inode.parent, name)
    policy = retention.policy_of(inode)
    own = not inode.is_dir and bool(inode.xattrs)
    chain = (inode.ino, *context.chain) if own else context.chain
    sources = [{"from": namespace.path(ino)} for ino in chain]
    sources += [
        {"from": f"config stream {table.path!r}", "glob": table.path}
        for table in context.configured
    ]
    fields = {
        field: {"value": _plain(getattr(policy, field)), **sources[index]}
        for field, index in policy.origins.items()
    }
    record = retention.record_of(inode)
    finite = record is not None and math.isfinite(record.retire)
    kept = retention.why_kept(record) if record is not None else None
    return {
        "path": namespace.path(inode.ino),
        "class": policy.file_class.value,
        "attributes": fields,
        "layout": None if context.match is None else Layout(context.match.layout).value,
        "stream": None if context.match is None else namespace.path(context.stream),
        "generation": None if record is None else record.number,
        "state": None if record is None else State(record.state).shown,
        "birth_epoch": None if record is None else record.birth,
        "retire_epoch": record.retire if record is not None and finite else None,
        "anchor": record is not None and math.isinf(record.retire),
        "origin": _origin(record, context, policy) + (f"; kept: {kept}" if kept else ""),
        "reason": None if record is None else retention.reasons.get(record.generation),
        "presumed": record is not None and record.state == State.PRESUMED,
    }


def _origin(
    record: layout.GenerationRecord | None, context: Context, policy: lifetimes.Policy
) -> str:
    if record is not None:
        return record.origin.decode(errors="replace")
    if context.match is not None:
        return f"generation {context.match.number} by its name; nothing written yet"
    if policy.origins:
        return "attributes, but no generation: the name has no number"
    return f"class {policy.file_class.value} by default"


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, FileClass) else value
