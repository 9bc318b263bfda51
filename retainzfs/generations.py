"""What people are told of generations: the table of a stream, and why a hint applies."""

from __future__ import annotations

import math
from typing import Any

from retainzfs import layout, lifetimes
from retainzfs.lifetimes import FileClass, Layout
from retainzfs.namespace import Inode
from retainzfs.retention import Context, Retention, State, Stream


def table(retention: Retention, ino: int) -> list[dict[str, Any]]:
    """Return the rows of `generations --json` for the streams at and below a directory."""
    rows: list[dict[str, Any]] = []
    namespace = retention.namespace
    for stream in sorted(retention.streams.values(), key=lambda s: s.ino):
        inode = namespace.inodes.get(stream.ino)
        if inode is None or not namespace.below(inode, ino):
            continue
        retired = _retired(retention, stream, inode)
        for _, generation in sorted(stream.numbers.items()):
            record = namespace.generations[generation]
            rows.append(_row(retention, record, generation in retired))
    return rows


def _retired(retention: Retention, stream: Stream, inode: Inode) -> set[int]:
    """Return the complete generations that policy keeps no longer.

    Under keep_last that are those with K newer commits; the epochs are predictions. Only a
    retirement that was stated as an epoch is one.
    """
    records = [retention.namespace.generations[g] for g in stream.numbers.values()]
    complete = sorted((r for r in records if r.state == State.COMPLETE), key=lambda r: -r.order)
    keep = retention.policy_of(inode).keep_last
    late = [r for r in complete if r.retire <= retention.now_s()]
    beyond = complete[keep:] if keep is not None else []
    stated = [r for r in late if r.origin.startswith(b"retire=")]
    return {r.generation for r in (*beyond, *stated) if math.isfinite(r.retire)}


def _row(
    retention: Retention,
    record: layout.GenerationRecord,
    retired: bool,
) -> dict[str, Any]:
    namespace = retention.namespace
    inodes = [namespace.get(i) for i in retention.members.get(record.generation, ())]
    zones = {e.run.zone for i in inodes for e in i.extents if e.run.zone >= 0}
    tops = retention.tops(record)
    path = namespace.path(tops[0].ino if tops else record.stream)
    return {
        "number": record.number,
        "path": path,
        "state": (State.RETIRED if retired else State(record.state)).name.lower(),
        "size": sum(i.size for i in inodes),
        "birth_epoch": record.birth,
        "retire_epoch": record.retire if math.isfinite(record.retire) else None,
        "anchor": math.isinf(record.retire),
        "origin": record.origin.decode(errors="replace"),
        "reason": retention.reasons.get(record.generation),
        "zones": sorted(zones),
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
    record = namespace.generations.get(inode.generation)
    if record is None and context.match is not None:
        stream = retention.streams.get(context.stream)
        known = stream.numbers.get(context.match.number) if stream is not None else None
        record = namespace.generations.get(known or 0)
    finite = record is not None and math.isfinite(record.retire)
    return {
        "path": namespace.path(inode.ino),
        "class": policy.file_class.value,
        "attributes": fields,
        "layout": None if context.match is None else Layout(context.match.layout).value,
        "stream": None if context.match is None else namespace.path(context.stream),
        "generation": None if record is None else record.number,
        "state": None if record is None else State(record.state).name.lower(),
        "birth_epoch": None if record is None else record.birth,
        "retire_epoch": record.retire if record is not None and finite else None,
        "anchor": record is not None and math.isinf(record.retire),
        "origin": _origin(record, context, policy),
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
