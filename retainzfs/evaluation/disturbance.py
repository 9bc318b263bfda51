"""Workloads that do not keep to what policies are told: wrong hints, unknown sizes, broken habits.

A disturbance bends a workload of any family, from its seed. What was declared (`Workload.streams`)
and the hints are what a policy knows; the events are what happens. A family `paper+random` is
`paper` bent by `random`: the same saves, told wrongly.

The load stays what it was: what lives at the peak is never more than before, and resident anchors
make room where it would be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import mean
from typing import Final

from retainzfs.errors import UsageError
from retainzfs.evaluation.workload import (
    BLOCK,
    FAMILIES,
    Correction,
    Delete,
    Event,
    Family,
    Save,
    Stream,
    Workload,
)

Disturbance = Callable[[Workload, random.Random], Workload]
Hint = Callable[[Save], float]

WRONG_FACTOR: Final = 1.5  # of a lifetime; hints are wrong by it, one way or the other,
WRONG_BY: Final = 8.0  # or by so many epochs: two cadences of `paper`
ODD_EVERY: Final = 5  # saves of a stream, of which one is an anchor that nobody said, or none
SIZES_TOLD: Final = (0.3, 3.0)  # of the real size
BURST: Final = 8.0  # epochs, in which everything is saved at once
UNSAID_SHARE: Final = 0.5  # of the resident anchors' room, for anchors that nobody said
STOPPED: Final = 0.4  # of the run, when a stream stops
CHANGED: Final = (0.33, 0.67)  # of the run, between which half as many are kept


# Hints


def _hints(hint: Callable[[Workload, random.Random], Hint]) -> Disturbance:
    """A disturbance of the hints of finite generations alone."""

    def bend(workload: Workload, chance: random.Random) -> Workload:
        told = hint(workload, chance)
        events = (
            event._replace(hint=told(event))
            if isinstance(event, Save) and math.isfinite(event.hint)
            else event
            for event in workload.events
        )
        return replace(workload, events=tuple(events))

    return bend


def _random(workload: Workload, chance: random.Random) -> Hint:
    longest = max(_life(stream) for stream in workload.streams)
    return lambda save: save.time + chance.uniform(1.0, 2 * longest)


def _constant(workload: Workload, _chance: random.Random) -> Hint:
    return lambda save: workload.end


def _scaled(factor: float, by: float) -> Callable[[Workload, random.Random], Hint]:
    """Every second stream is wrong by a factor, the others by a sum."""

    def hint(_workload: Workload, _chance: random.Random) -> Hint:
        def told(save: Save) -> float:
            life = save.hint - save.time
            return save.time + max(1.0, life * factor if save.stream % 2 else life + by)

        return told

    return hint


def _declared(streams: Callable[[Sequence[Stream]], Sequence[Stream]]) -> Disturbance:
    """Another K is declared than the one that is kept to, and hints follow what is declared."""

    def bend(workload: Workload, chance: random.Random) -> Workload:
        said = replace(workload, streams=tuple(streams(workload.streams)))
        return _hints(lambda w, _: lambda s: s.time + _life(w.streams[s.stream]))(said, chance)

    return bend


def _equal(streams: Sequence[Stream]) -> list[Stream]:
    keep = round(mean(stream.keep for stream in streams))
    return [stream._replace(keep=keep) for stream in streams]


def _inverted(streams: Sequence[Stream]) -> list[Stream]:
    """Who keeps most says to keep least."""
    most = max(s.keep for s in streams) + min(s.keep for s in streams)
    return [stream._replace(keep=most - stream.keep) for stream in streams]


# Anchors


def anchors_unsaid(workload: Workload, _chance: random.Random) -> Workload:
    """Some generations are never deleted, and hinted like all others. They replace resident
    anchors, so that the load is what it was."""
    room = UNSAID_SHARE * sum(workload.anchors)
    kept = set()
    for save in _odd(workload):
        if save.size <= room:
            room -= save.size
            kept.add(save.generation)
    less = sum(save.size for save in _saves(workload) if save.generation in kept)
    events = (e for e in workload.events if isinstance(e, Save) or e.generation not in kept)
    return _with_room(replace(workload, events=tuple(events)), less)


def _with_room(workload: Workload, less: int) -> Workload:
    """So many bytes fewer of resident anchors, as far as there are any."""
    anchors = list(workload.anchors)
    while less > 0 and anchors:
        last = anchors.pop()
        if last - less >= BLOCK:
            anchors.append((last - less) // BLOCK * BLOCK)
        less -= last
    return replace(workload, anchors=tuple(anchors))


def finite_as_anchor(workload: Workload, _chance: random.Random) -> Workload:
    """Some generations are said to stay for ever, and deleted like all others."""
    wrong = {save.generation for save in _odd(workload)}
    events = (
        e._replace(hint=math.inf) if isinstance(e, Save) and e.generation in wrong else e
        for e in workload.events
    )
    return replace(workload, events=tuple(events))


def _odd(workload: Workload) -> Iterator[Save]:
    counts = [0] * len(workload.streams)
    for save in _saves(workload):
        counts[save.stream] += 1
        if counts[save.stream] % ODD_EVERY == 0 and math.isfinite(save.hint):
            yield save


# Sizes


def unknown_size(workload: Workload, _chance: random.Random) -> Workload:
    """Shards come one by one, and a policy is told to expect one zone, then one more."""

    def parts(save: Save) -> Iterator[Save]:
        written = 0
        for part in _shards(save):
            yield part._replace(expected=workload.capacity - written % workload.capacity)
            written += part.size

    return _in_parts(workload, parts)


def wrong_size(workload: Workload, chance: random.Random) -> Workload:
    """As above, but the size that a policy is told is a wrong one."""

    def parts(save: Save) -> Iterator[Save]:
        rest = int(save.size * chance.uniform(*SIZES_TOLD))
        for part in _shards(save):
            yield part._replace(expected=max(0, rest))
            rest -= part.size

    return _in_parts(workload, parts)


def _in_parts(workload: Workload, parts: Callable[[Save], Iterator[Save]]) -> Workload:
    events = [part for e in workload.events for part in (parts(e) if isinstance(e, Save) else [e])]
    return replace(workload, events=tuple(events))


def _shards(save: Save) -> list[Save]:
    """A save as one event for each shard; what is expected is the truth."""
    parts, rest = [], save.size
    for shard in save.shards:
        part = save._replace(shards=(shard,), expected=rest, more=True)
        parts.append(part)
        rest -= part.size
    parts[-1] = parts[-1]._replace(more=False)
    return parts


# Time


def interleaved(workload: Workload, _chance: random.Random) -> Workload:
    """Streams save in pairs, at the same moments, and write their shards in turns."""
    own = _by_stream(workload)
    moved = []
    for stream, saves in own.items():
        leads = own[stream - stream % 2]
        moved += [_at(save, lead.time) for save, lead in zip(saves, leads, strict=False)]
        # When the other one has ended it goes on alone.
        later = max(0.0, leads[-1].time - saves[: len(leads)][-1].time)
        moved += [_at(save, save.time + later) for save in saves[len(leads) :]]
    deletes = [delete for _, delete in _deletes(workload, moved)]
    events: list[Event] = []
    for time in sorted({s.time for s in moved} | {d.time for d in deletes}):
        now = [_shards(save) for save in moved if save.time == time]
        events += [part for turn in zip_longest(*now) for part in turn if part is not None]
        events += [delete for delete in deletes if delete.time == time]
    # Both new generations live beside both old ones, where alone one would.
    more = max(stream.size for stream in workload.streams)
    return _with_room(replace(workload, events=tuple(events)), math.ceil(more))


def burst(workload: Workload, _chance: random.Random) -> Workload:
    """What would be saved in `BURST` epochs is saved and committed at once, one after another."""
    moved = [_at(save, save.time // BURST * BURST) for save in _saves(workload)]
    deletes = _deletes(workload, moved)
    return replace(workload, events=_ordered(moved, deletes))


def stops(workload: Workload, chance: random.Random) -> Workload:
    """A stream ends, and its last generations stay."""
    stopped = chance.randrange(len(workload.streams))
    end = workload.end * STOPPED
    left = [save for save in _saves(workload) if save.stream != stopped or save.time < end]
    return replace(workload, events=_ordered(left, _deletes(workload, left)))


def stops_and_goes(workload: Workload, chance: random.Random) -> Workload:
    """A stream ends, and later all that it has left is deleted at once."""
    ended = stops(workload, chance)
    time = workload.end * CHANGED[1]
    deleted = {event.generation for event in ended.events if isinstance(event, Delete)}
    stopped = min(_by_stream(ended).values(), key=lambda saves: saves[-1].time)
    left = [save.generation for save in stopped if save.generation not in deleted]
    goes = [Delete(time, generation) for generation in left]
    events = sorted((*ended.events, *goes), key=lambda event: event.time)
    return replace(workload, events=tuple(events))


# Policy


def changed(workload: Workload, _chance: random.Random) -> Workload:
    """Half as many generations are kept for a while. Nobody says so."""
    return _changed(workload, told=False)


def changed_corrected(workload: Workload, _chance: random.Random) -> Workload:
    """As above, and all hints follow when the policy changes."""
    return _changed(workload, told=True)


def _changed(workload: Workload, *, told: bool) -> Workload:
    start, stop = (workload.end * share for share in CHANGED)

    def keep(stream: Stream, time: float) -> int:
        return max(1, stream.keep // 2) if start <= time < stop else stream.keep

    events: list[Event] = []
    corrections: list[Correction] = []
    for index, saves in _by_stream(workload).items():
        stream, kept, before = workload.streams[index], list[Save](), 0.0
        for save in saves:
            most = keep(stream, save.time)
            life = most * stream.cadence
            if told and most != keep(stream, before):
                corrections += [Correction(save.time, s.generation, s.time + life) for s in kept]
            before = save.time
            if math.isinf(save.hint):
                events.append(save)
                continue
            kept.append(save._replace(hint=save.time + life) if told else save)
            events.append(kept[-1])
            gone, kept = kept[:-most], kept[-most:]
            events += [Delete(save.time + stream.late, old.generation) for old in gone]
    return replace(
        workload,
        events=tuple(sorted(events, key=lambda event: event.time)),
        corrections=tuple(sorted(corrections)),
    )


# What they are made of


def _life(stream: Stream) -> float:
    return stream.keep * stream.cadence


def _saves(workload: Workload) -> list[Save]:
    return [event for event in workload.events if isinstance(event, Save)]


def _by_stream(workload: Workload) -> dict[int, list[Save]]:
    own: dict[int, list[Save]] = {index: [] for index in range(len(workload.streams))}
    for save in _saves(workload):
        own[save.stream].append(save)
    return own


def _at(save: Save, time: float) -> Save:
    """The same save at another time, and as long-lived."""
    return save._replace(time=time, hint=save.hint + time - save.time)


def _deletes(workload: Workload, saves: Iterable[Save]) -> list[tuple[int, Delete]]:
    """The deletions, each with the generation whose save causes it: as long after that one as it
    was. What `saves` does not have causes none."""
    times = {save.generation: save.time for save in saves}
    causes = {
        saves[number].generation: saves[number + stream.keep]
        for stream, saves in zip(workload.streams, _by_stream(workload).values(), strict=True)
        for number in range(len(saves) - stream.keep)
    }
    found = []
    for event in workload.events:
        if isinstance(event, Delete):
            cause = causes[event.generation]
            if cause.generation in times:
                late = event.time - cause.time
                deleted = event._replace(time=times[cause.generation] + late)
                found.append((cause.generation, deleted))
    return found


def _ordered(saves: Sequence[Save], deletes: Sequence[tuple[int, Delete]]) -> tuple[Event, ...]:
    """By time; at one moment a save's deletions come before the next save."""
    after: dict[int, list[Delete]] = {}
    for cause, delete in deletes:
        after.setdefault(cause, []).append(delete)
    events: list[Event] = []
    for save in saves:
        events += [save, *after.get(save.generation, [])]
    return tuple(sorted(events, key=lambda event: event.time))


DISTURBANCES: Final[dict[str, Disturbance]] = {
    "random": _hints(_random),
    "constant": _hints(_constant),
    "equal": _declared(_equal),
    "inverted": _declared(_inverted),
    "late": _hints(_scaled(WRONG_FACTOR, WRONG_BY)),
    "early": _hints(_scaled(1 / WRONG_FACTOR, -WRONG_BY)),
    "anchors-unsaid": anchors_unsaid,
    "finite-as-anchor": finite_as_anchor,
    "unknown-size": unknown_size,
    "wrong-size": wrong_size,
    "interleaved": interleaved,
    "burst": burst,
    "stops": stops,
    "stops-and-goes": stops_and_goes,
    "changed": changed,
    "changed-corrected": changed_corrected,
}


# What changes the hints of whatever saves there are, and nothing else.
TELLING: Final = frozenset({"random", "constant", "late", "early"})


def family(name: str) -> Family:
    """The family of that name, bent by the disturbances that it names: `paper`, `paper+random`,
    `small+interleaved+late`. The saves are those of the first name; what bends the saves themselves
    comes first, since hints are told of what is saved, and there is one such at most.

    Raises UsageError for a name that does not exist, or that cannot stand there.
    """
    base, *disturbances = name.split("+")
    if base not in FAMILIES:
        raise UsageError(f"no family {base!r}; known: {', '.join(FAMILIES)}")
    for disturbance in disturbances:
        if disturbance not in DISTURBANCES:
            known = ", ".join(DISTURBANCES)
            raise UsageError(f"no disturbance {disturbance!r} of {base}; known: {known}")
    for disturbance in disturbances[1:]:
        if disturbance not in TELLING:
            raise UsageError(
                f"{name}: {disturbance!r} stands first or not at all; behind another can stand"
                f" {', '.join(sorted(TELLING))}"
            )
    if not disturbances:
        return FAMILIES[base]

    def bend(workload: Workload, chance: random.Random) -> Workload:
        for disturbance in disturbances:
            workload = DISTURBANCES[disturbance](workload, chance)
        return replace(workload, name=name)

    return replace(FAMILIES[base], bend=bend)
