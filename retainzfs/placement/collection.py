"""What collection copies, and where to: pure functions from summaries.

A victim is emptied piece by piece, a piece being what one generation has in it, and then reset.
Idle compaction is the same move, made not for room but because a zone that is mostly dead would
otherwise stay for long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from retainzfs.errors import UsageError
from retainzfs.placement import FINISH_HORIZON, ZoneSummary, finite
from retainzfs.placement.plan import Market

SMALL: Final = 8 * 4096  # bytes; keeps the score of a nearly dead zone finite
SPLIT: Final = 0.25  # zone capacities times E: what cutting a piece in two counts for
IDLE_SHARE: Final = 0.02  # of all bytes saved; so much may be copied for hints that prove wrong
IDLE_GAIN: Final = 20.0  # E of a zone per zone copied, from which on compaction pays


class Victim(NamedTuple):
    """A zone that could be emptied. Bytes; `retire` is the latest of its live bytes."""

    zone: int
    capacity: int
    live: int
    retire: float
    tail: int = 0


class Piece(NamedTuple):
    generation: int
    size: int
    retire: float


Rank = Callable[[Victim, float, float], float]


def by_dead_time(victim: Victim, now: float, unit: float) -> float:
    """Dead space, times how long it would stay, per byte to copy."""
    stays = max(unit, min(victim.retire - now, FINISH_HORIZON * unit))
    return (victim.capacity - victim.live) * stays / (victim.live + SMALL)


def greedy(victim: Victim, _now: float, _unit: float) -> float:
    """Least to copy."""
    return -float(victim.live)


RANKS: Final[dict[str, Rank]] = {"dead-time": by_dead_time, "greedy": greedy}


def ranking(name: str) -> Rank:
    """The rank of that name. Raises UsageError for an unknown one."""
    if name not in RANKS:
        raise UsageError(f"no rank of victims {name!r}; known: {', '.join(RANKS)}")
    return RANKS[name]


def ranked(
    victims: Iterable[Victim], now: float, unit: float, rank: Rank = by_dead_time
) -> list[Victim]:
    """The best victim first; ties to the lowest index."""
    return sorted(victims, key=lambda victim: (-rank(victim, now, unit), victim.zone))


def destination(
    piece: Piece,
    size: int,
    tails: Sequence[ZoneSummary],
    capacity: int,
    unit: float,
    *,
    apart: bool = True,
) -> ZoneSummary | None:
    """The tail for `size` bytes of a piece: the one that they hold up least, per byte placed.

    None if there is none. What never retires is not put to what does, unless a policy does not
    keep them `apart`.
    """

    def cost(zone: ZoneSummary) -> float:
        placed = min(size, zone.tail)
        late = 0.0
        if not math.isinf(zone.retire_max):
            late = capacity * max(0.0, piece.retire - zone.retire_max)
        return (late + SPLIT * unit * capacity * (placed < size)) / placed

    usable = [
        zone
        for zone in tails
        if zone.tail and not (apart and math.isinf(piece.retire) and finite(zone))
    ]
    return min(usable, key=lambda zone: (cost(zone), zone.index), default=None)


def into_tails(
    piece: Piece, tails: dict[int, ZoneSummary], capacity: int, unit: float, *, apart: bool = True
) -> Iterator[tuple[int, int]]:
    """Yield (zone, bytes) as tails take a piece, and take that off them (by zone). What they do not
    take is left."""
    left = piece.size
    while left:
        into = destination(piece, left, list(tails.values()), capacity, unit, apart=apart)
        if into is None:
            return
        nbytes = min(left, into.tail)
        tails[into.index] = replace(into, tail=into.tail - nbytes)
        left -= nbytes
        yield into.index, nbytes


def gain(victim: Victim, into: ZoneSummary | None, market: Market) -> float:
    """What moving a zone whole into a tail, or to a fresh zone, gains though nobody needs the room,
    as zone-time per zone copied. -inf where it cannot be done."""
    if into is None:
        kept = market.value(victim.capacity - victim.live, victim.retire)
        return (kept - market.value(victim.tail, victim.retire)) / victim.live
    if victim.live > into.tail or math.isinf(victim.retire + into.retire_max):
        return -math.inf
    latest = max(victim.retire, into.retire_max)
    won = victim.capacity * (victim.retire - market.now - (latest - into.retire_max))
    won -= market.value(victim.tail, victim.retire) + market.value(into.tail, into.retire_max)
    won += market.value(into.tail - victim.live, latest)
    return won / victim.live


def idle_move(
    choices: Iterable[tuple[Victim, Iterable[ZoneSummary | None]]], market: Market, unit: float
) -> tuple[Victim, int | None] | None:
    """The move that gains most, at least `IDLE_GAIN`: (victim, zone that it goes to, or None for a
    fresh one). Each victim comes with the tails that it could go to; what is more than half alive
    is left alone. Ties to what comes first."""
    best, most = None, -math.inf
    for victim, tails in choices:
        if not 0 < victim.live <= victim.capacity // 2:
            continue
        for into in tails:
            won = gain(victim, into, market)
            if won >= IDLE_GAIN * unit and won > most:
                best, most = (victim, into.index if into is not None else None), won
    return best
