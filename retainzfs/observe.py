"""What a volume tells about itself: statistics, the zone map, metrics. Only reads."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from retainzfs.lifetimes import FileClass
from retainzfs.placement import admission
from retainzfs.trouble import STATES
from retainzfs.zone import LOST, Kind, State, Zone

if TYPE_CHECKING:
    from retainzfs.volume import Volume


def statistics(volume: Volume) -> dict[str, Any]:
    """Return `status --json`. Bytes are integers, times seconds or epochs where named so."""
    table, stream = volume.table, volume.stream
    totals = table.totals
    host = stream.written + volume.journal.appended
    states = table.states() + Counter(_stuck(volume).values())
    return {
        "target": volume.device.name,
        "uuid": volume.uuid.hex(),
        "policy": volume.options.policy,
        "admission": admission.usual(volume.options.admission, volume.options.policy),
        "epoch": volume.now_s(),
        "capacity": sum(totals),
        "used": totals.live + totals.pending,
        "free": totals.free + totals.tail,
        "dead": totals.dead,
        "tail": totals.tail + totals.stranded,
        "zones": {
            "capacity": table.capacity,
            "empty": states[State.EMPTY],
            "open": states[State.OPEN],
            "active": states[State.OPEN] + states[State.CLOSED],
            "full": states[State.FULL],
            "read_only": states[State.READ_ONLY],
            "offline": states[State.OFFLINE],
            "reset_total": volume.reclaim.resets,
        },
        "write_amplification": host / volume.logical if volume.logical else None,
        "logical_bytes": volume.logical,
        "host_bytes": host,
        "copied_bytes": volume.copier.copied - volume.reclaim.compacted,
        "compacted_bytes": volume.reclaim.compacted,
        "journal_bytes": volume.journal.appended,
        "collections": volume.reclaim.collections,
        "compactions": volume.reclaim.compactions,
        "borrows": volume.lanes.borrows,
        "commit_rounds": volume.committer.rounds,
        "plans": volume.lanes.plans,
        "decision_us": volume.lanes.decision_us(),
        "write_errors": stream.write_errors,
        "checksum_errors": volume.reader.checksum_errors,
        "read_errors": volume.reader.read_errors,
        "scrub": volume.scrub.statistics(),
        "rolled_back_bytes": volume.rolled_back,
        "failed": None if volume.failed is None else str(volume.failed),
        "classes": _classes(volume),
        "streams": _streams(volume),
        "device": volume.device.statistics(),
    }


def _classes(volume: Volume) -> dict[str, dict[str, int]]:
    out = {c.value: {"files": 0, "bytes": 0} for c in FileClass}
    for inode in volume.namespace.inodes.values():
        if inode.is_file:
            entry = out[volume.retention.class_of(inode).value]
            entry["files"] += 1
            entry["bytes"] += inode.size
    return out


def _streams(volume: Volume) -> list[dict[str, Any]]:
    rows = []
    for stream in volume.retention.all_streams():
        if stream.ino not in volume.namespace.inodes or not stream.numbers:
            continue
        complete = volume.retention.counted(stream)
        newest = complete[0] if complete else None
        rows.append(
            {
                "path": volume.path(stream.ino),
                "names": sorted(map(os.fsdecode, stream.series)),
                "generations": len(stream.numbers),
                "complete": len(complete),
                "newest_committed": None if newest is None else newest.number,
                "newest_published": None,
                "cadence_s": volume.retention.cadence_of(stream),
                "size": stream.size,
            }
        )
    return rows


def _stuck(volume: Volume) -> dict[int, State]:
    """Return those of the journal's zones that it can no longer write."""
    return {zone: STATES[condition] for zone, condition in volume.journal.stuck().items()}


def zone_map(volume: Volume) -> list[dict[str, Any]]:
    """Return `zones --json`, one entry a zone; the journal's zones are of class `metadata`."""
    stuck = _stuck(volume)
    return [_zone(volume, zone, stuck.get(zone.index, zone.state)) for zone in volume.table.zones]


def _zone(volume: Volume, zone: Zone, state: State) -> dict[str, Any]:
    retire = [volume.retention.retire_of(g) for g in zone.live]
    finite = [r for r in retire if math.isfinite(r)]
    metadata = zone.kind is Kind.METADATA
    used = 0
    if metadata and zone.index in volume.journal.chain.values():
        current = volume.journal.chain.get(volume.journal.position) == zone.index
        used = volume.journal.write_pointer if current else zone.capacity
    empty = zone.state is State.EMPTY and not used
    if used and state not in LOST:
        state = State.FULL if used == zone.capacity else State.OPEN
    return {
        "index": zone.index,
        "condition": state.name.lower(),
        "class": "metadata" if metadata else None if empty else zone.kind.name.lower(),
        "write_pointer": used or zone.write_pointer,
        "capacity": zone.capacity,
        "live": used or zone.live_bytes,
        "dead": 0 if metadata else zone.totals().dead,
        "tail": 0 if metadata else zone.totals().tail + zone.totals().stranded,
        "retire_min": min(finite, default=None),
        "retire_max": max(finite, default=None) if len(finite) == len(retire) else None,
        "resets": zone.epoch,
    }


METRICS = (
    ("capacity_bytes", "gauge", "Capacity of the data zones", "capacity"),
    ("used_bytes", "gauge", "Live bytes", "used"),
    ("free_bytes", "gauge", "Bytes that can be written without reclaiming", "free"),
    ("dead_bytes", "gauge", "Written bytes that nothing holds", "dead"),
    ("tail_bytes", "gauge", "Unwritten bytes of zones in use", "tail"),
    ("logical_bytes_total", "counter", "Bytes that programs wrote", "logical_bytes"),
    ("host_bytes_total", "counter", "Bytes written to the device", "host_bytes"),
    ("copied_bytes_total", "counter", "Bytes moved by collection", "copied_bytes"),
    ("compacted_bytes_total", "counter", "Bytes moved in idle time", "compacted_bytes"),
    ("borrows_total", "counter", "Times the emergency zone was lent to a save", "borrows"),
    ("commit_rounds_total", "counter", "Commit rounds", "commit_rounds"),
    ("write_errors_total", "counter", "Writes that the device refused", "write_errors"),
    ("checksum_errors_total", "counter", "Reads that failed their checksum", "checksum_errors"),
    ("read_errors_total", "counter", "Reads that the device refused", "read_errors"),
)


def metrics(volume: Volume) -> str:
    """Return the statistics as Prometheus text."""
    told = statistics(volume)
    lines = []
    for name, kind, text, key in METRICS:
        lines += [
            f"# HELP retainzfs_{name} {text}.",
            f"# TYPE retainzfs_{name} {kind}",
            f"retainzfs_{name} {told[key]}",
        ]
    lines += ["# HELP retainzfs_zones Zones by state.", "# TYPE retainzfs_zones gauge"]
    for state in ("empty", "open", "active", "full", "read_only", "offline"):
        lines.append(f'retainzfs_zones{{state="{state}"}} {told["zones"][state]}')
    lines += [
        "# HELP retainzfs_zone_resets_total Zones reset.",
        "# TYPE retainzfs_zone_resets_total counter",
        f"retainzfs_zone_resets_total {told['zones']['reset_total']}",
    ]
    return "\n".join(lines) + "\n"
