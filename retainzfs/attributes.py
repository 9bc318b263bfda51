"""Extended attributes of a volume: stored ones, ours that act, ours that are computed."""

from __future__ import annotations

import errno
import json
import logging
from typing import TYPE_CHECKING, Any

from retainzfs import errors, generations, layout, lifetimes
from retainzfs.lifetimes import Act, ScrubOrder
from retainzfs.namespace import FSError, Inode
from retainzfs.streams import State

if TYPE_CHECKING:
    from retainzfs.volume import Volume

log = logging.getLogger(__name__)

XATTR_CREATE = 1
XATTR_REPLACE = 2
NAME_MAX = 255
HIDDEN = b"retainz."  # attributes that the filesystem keeps for itself


def get(volume: Volume, inode: Inode, name: bytes) -> bytes:
    """Return an attribute's value. Raises FSError(ENODATA)."""
    if lifetimes.is_ours(name):
        computed = _computed(
            volume, inode, name.removeprefix(lifetimes.PREFIX.encode()).decode(errors="replace")
        )
        if computed is not None:
            return computed
    value = None if name.startswith(HIDDEN) else (inode.xattrs or {}).get(name)
    if value is None:
        # No path in the message: the kernel asks for security.capability at every chown.
        raise FSError(errno.ENODATA, name.decode(errors="replace"))
    return value


def _computed(volume: Volume, inode: Inode, name: str) -> bytes | None:
    retention = volume.retention
    match name:
        case "generations":
            return json.dumps(generations.table(retention, volume.table, inode.ino)).encode()
        case "history":
            return _newest(generations.history(retention, inode.ino))
        case "explain":
            return json.dumps(generations.explain(retention, inode)).encode()
        case "hint":
            told = generations.explain(retention, inode)
            hint = {"a": told["birth_epoch"], "d": told["retire_epoch"], "origin": told["origin"]}
            return json.dumps(hint).encode()
        case "zones":
            zones = sorted({e.run.zone for e in inode.extents if e.run.zone >= 0})
            return json.dumps(zones).encode()
        case "extents":
            return json.dumps(
                [[e.block, e.blocks, e.run.zone, e.run.start + e.first] for e in inode.extents]
            ).encode()
        case "generation" | "state" | "stream":
            record = retention.record_of(inode)
            return None if record is None else _of_generation(volume, record, name)
    return None


def _newest(rows: list[dict[str, Any]]) -> bytes:
    """Return as many of the last rows as an attribute holds."""
    while len(encoded := json.dumps(rows).encode()) > layout.XATTR_VALUE_MAX:
        rows = rows[len(rows) // 2 + 1 :]
    return encoded


def _of_generation(volume: Volume, record: layout.GenerationRecord, name: str) -> bytes:
    if name == "generation":
        return str(record.number).encode()
    if name == "state":
        return State(record.state).shown.encode()
    return volume.path(record.stream).encode(errors="surrogateescape")


async def set_(volume: Volume, inode: Inode, name: bytes, value: bytes, flags: int) -> None:
    """Set an attribute. Raises BadAttribute or NotYet for ours, with a line in the log."""
    if len(name) > NAME_MAX:
        raise FSError(errno.ERANGE, volume.path(inode.ino))
    if len(value) > min(layout.XATTR_VALUE_MAX, volume.journal.batch_max // 2):
        raise FSError(errno.E2BIG, volume.path(inode.ino))
    present = name in (inode.xattrs or {})
    if flags & XATTR_CREATE and present:
        raise FSError(errno.EEXIST, volume.path(inode.ino))
    if flags & XATTR_REPLACE and not present:
        raise FSError(errno.ENODATA, volume.path(inode.ino))
    if name.startswith((b"system.posix_acl_", HIDDEN)):
        raise FSError(errno.ENOTSUP, volume.path(inode.ino))
    if lifetimes.is_ours(name):
        try:
            parsed = lifetimes.parse(name, value)
            if name == b"user.retainz.retire":
                _check_retire(volume, inode, parsed)
        except errors.RetainzError as error:
            log.warning("%s: %s", volume.path(inode.ino), error)
            raise
        if isinstance(parsed, ScrubOrder):
            volume.scrub_as(parsed)
            return
        if isinstance(parsed, Act):
            await _act(volume, inode, parsed)
            return
    _change(volume, inode, layout.XattrRecord(inode.ino, name, value))
    if lifetimes.is_ours(name):
        _follow(volume, inode)


async def remove(volume: Volume, inode: Inode, name: bytes) -> None:
    if name not in (inode.xattrs or {}) or name.startswith(HIDDEN):
        raise FSError(errno.ENODATA, volume.path(inode.ino))
    _change(volume, inode, layout.XattrRemovedRecord(inode.ino, name))
    if lifetimes.is_ours(name):
        _follow(volume, inode)


def _change(volume: Volume, inode: Inode, record: layout.Record) -> None:
    now = volume.options.wall_ns()
    described = volume.namespace.describe(inode)._replace(ctime_ns=now)
    volume.committer.log(described, record)


def _check_retire(volume: Volume, inode: Inode, retire: object) -> None:
    assert isinstance(retire, float), "a retirement is parsed as an epoch"
    record = volume.namespace.generations.get(inode.generation)
    cadence = volume.retention.policy_of(inode).cadence_s
    if cadence is None:
        streams = volume.retention.streams.get(record.stream if record else inode.ino, [])
        known = [stream.history.cadence_s for stream in streams]
        cadence = max(filter(None, known), default=None)
    lifetimes.check_retire(retire, volume.now_s(), cadence)


def _follow(volume: Volume, inode: Inode) -> None:
    """A policy changed: retirements of what exists follow."""
    if inode.is_file:
        generation, records = volume.retention.own(inode)
        if generation != inode.generation:
            described = volume.namespace.describe(inode)._replace(generation=generation)
            records = [*records, described]
        if records:
            volume.committer.log(*records)
            volume.retention.joined(inode)
    volume.committer.log_each(volume.retention.refresh(inode))


async def _act(volume: Volume, inode: Inode, act: Act) -> None:
    if act is Act.COLLECT:
        await volume.collect()
        return
    assert act is Act.COMPLETE, f"an unknown act {act}"
    record = volume.retention.record_of(inode)
    if record is None:
        raise errors.BadAttribute(
            "user.retainz.commit",
            f"{volume.path(inode.ino)} is in no generation",
            "a generation's file or directory",
        )
    generation = record.generation
    members = volume.retention.members.get(generation, set())
    dirty = [i for ino, i in volume.committer.dirty.items() if ino in members]
    await volume.committer.commit(dirty)
    volume.retention.vouched(generation)
    volume.completed(generation)
    await volume.committer.commit()
