"""Policy `zenfs`: the data-file allocator of ZenFS, for comparison.

A file has one of four lifetimes and a zone the lifetime of the first file in it. The active zones
are scanned by index; the last one with the least difference (zone minus file; 50 if they are equal,
100 if the zone's is shorter) is used if it is below 50. Otherwise a fresh zone is opened, if there
is an active slot; without one an equal zone is used, and only if there is none the zone with the
least capacity left is finished. Tails are not looked at.

Which lifetime a checkpoint has is a mapping: none has one, all have the same, anchors are told from
the rest, or the rest is also told apart by how long it lives.

Source: zonefs allocation of ZenFS (fs/zbd_zenfs.cc: GetBestOpenZoneMatch, AllocateIOZone).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Final

from retainzfs.errors import UsageError
from retainzfs.placement import Draft, Plan, Policy, Request, View, ZoneSummary

EQUAL: Final = 50  # difference of a zone that holds the same lifetime
NO_MATCH: Final = 100


class Lifetime(enum.IntEnum):
    """As RocksDB's WriteLifeTimeHint."""

    NOT_SET = 0
    SHORT = 2
    MEDIUM = 3
    LONG = 4
    EXTREME = 5


SHORT_E: Final = 12.0  # the three classes of finite lifetimes, in E: below, up to, and from
LONG_E: Final = 24.0


def _not_set(_lifetime: float) -> Lifetime:
    return Lifetime.NOT_SET


def _medium(_lifetime: float) -> Lifetime:
    return Lifetime.MEDIUM


def _two(lifetime: float) -> Lifetime:
    return Lifetime.EXTREME if math.isinf(lifetime) else Lifetime.MEDIUM


def _classes(lifetime: float) -> Lifetime:
    if math.isinf(lifetime):
        return Lifetime.EXTREME
    if lifetime < SHORT_E:
        return Lifetime.SHORT
    return Lifetime.MEDIUM if lifetime < LONG_E else Lifetime.LONG


MAPPINGS: Final[dict[str, Callable[[float], Lifetime]]] = {
    "not-set": _not_set,
    "medium": _medium,
    "anchors": _two,
    "classes": _classes,
}


@dataclass(frozen=True)
class ZenFS(Policy):
    """`mapping` of `MAPPINGS`; `finish_threshold`: percent of a zone."""

    name: str = "zenfs"
    mapping: str = "anchors"
    finish_threshold: float = 0.0
    apart: ClassVar[bool] = False

    @property
    def finish_below(self) -> float:
        return self.finish_threshold / 100

    def __post_init__(self) -> None:
        if self.mapping not in MAPPINGS:
            raise UsageError(f"no mapping {self.mapping!r}; known: {', '.join(MAPPINGS)}")

    def plan(self, request: Request, view: View) -> Plan:
        lifetime = MAPPINGS[self.mapping](
            (request.lifetime or request.retire - view.now) / view.unit
        )
        draft = Draft(request, view)
        while draft.left:
            zones = draft.zones.values()
            best, difference = match(zones, lifetime)
            most = NO_MATCH if view.scarce else EQUAL + (draft.slots <= 0)
            if best is not None and difference < most:
                draft.put(best)
            elif draft.empties > 0:
                loser = min(zones, key=lambda z: (z.tail, z.index), default=None)
                draft.open(loser if draft.slots <= 0 else None, lifetime)
            else:
                break
        return draft.plan()


def match(zones: Iterable[ZoneSummary], lifetime: Lifetime) -> tuple[ZoneSummary | None, int]:
    """The active zone whose lifetime is nearest, the last of equals, and the difference."""
    best, least = None, NO_MATCH
    for zone in zones:
        if zone.tag > lifetime:
            difference = zone.tag - lifetime
        else:
            difference = EQUAL if zone.tag == lifetime else NO_MATCH
        if difference <= least:
            best, least = zone, difference
    return best, least


POLICIES: Final[dict[str, Callable[..., Policy]]] = {"zenfs": ZenFS}
