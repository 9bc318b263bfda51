"""Saves and deletions of several jobs at once, from a seed: what an experiment replays.

A stream saves every `cadence` epochs and keeps the last K of its generations. In an epoch a
generation is saved, committed, and then the one that it retires is deleted. Resident anchors fill
the rest of the device up to the load: the share of its data zones that lives at the peak.

Sizes are in bytes, times in epochs; E, placement's unit, is one epoch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from retainzfs.errors import UsageError
from retainzfs.evaluation.models import SHARDS as MODELS

BLOCK: Final = 4096
MIB: Final = 1 << 20
SHARDS: Final = 8
SHARD_SPREAD: Final = (0.7, 1.3)  # of the mean shard
DRIVE_ZONE: Final = 1077 * MIB  # capacity of a zone of a common NVMe ZNS drive (WD ZN540)
WARM_UP: Final = 20.0  # epochs that are not counted


class Stream(NamedTuple):
    keep: int
    cadence: float
    offset: float
    size: float  # bytes of a generation, on average
    late: float = 0.0  # deletions come so many epochs after the hint


class Save(NamedTuple):
    """`hint` is what the policy is told, inf for an anchor; `generation` counts all saves.

    A generation may come in several of these, all but the last one with `more`. `expected`: bytes
    that the policy is told to expect from here on, if they are more than these.
    """

    time: float
    stream: int
    generation: int
    shards: tuple[int, ...]
    hint: float
    expected: int = 0
    more: bool = False

    @property
    def size(self) -> int:
        """Bytes on the device: every shard is padded to whole blocks."""
        return sum(-(-shard // BLOCK) * BLOCK for shard in self.shards)


class Delete(NamedTuple):
    time: float
    generation: int


class Correction(NamedTuple):
    """A policy is told another hint for a generation that is there already."""

    time: float
    generation: int
    hint: float


Event = Save | Delete


@dataclass(frozen=True)
class Workload:
    name: str
    capacity: int  # bytes of a zone
    zones: int  # for data, the one that is held back for collection included
    active: int  # zones that data may have active
    streams: tuple[Stream, ...]
    anchors: tuple[int, ...]  # bytes of those that are there from the beginning
    events: tuple[Event, ...]  # in order
    end: float
    warm_up: float = WARM_UP
    corrections: tuple[Correction, ...] = ()  # in order; before the events of that time

    @property
    def saves(self) -> int:
        return sum(isinstance(event, Save) and not event.more for event in self.events)


@dataclass(frozen=True)
class Family:
    """How a workload comes from its seed; the defaults are the paper's."""

    name: str
    keeps: tuple[int, ...] = (2, 4, 5, 7)
    cadences: tuple[float, ...] = (4.0, 4.0, 4.0, 4.0)
    sizes: tuple[float, float] = (0.74, 2.27)  # zone capacities
    size_jitter: float = 0.02
    cadence_jitter: float = 0.0  # epochs, to either side
    poisson: bool = False  # saves come at random times instead
    grid: float = 0.0  # hints are rounded up to multiples of it
    late: tuple[float, ...] = ()  # epochs, one for each stream
    late_most: float = 0.0  # epochs; deletions are late at random, up to so many
    milestone_every: int = 0  # saves of a stream
    zones: int = 58
    saves: int = 250
    active: int = 6
    zone_size: int = 4 * MIB
    model: tuple[int, ...] = ()  # bytes of each shard of every generation, in zones of DRIVE_ZONE
    inputs: str = ""  # the family whose saves these are, seed by seed, where not its own
    bend: Callable[[Workload, random.Random], Workload] | None = field(default=None, repr=False)

    def make(self, seed: int, load: float) -> Workload:
        """The workload of one seed. Raises UsageError for a load that the streams alone exceed."""
        chance = random.Random(f"{self.inputs or self.name} {seed}")
        streams = self._streams(chance)
        events = self._events(streams, chance)
        anchored = sum(save.size for save in events if isinstance(save, Save) and _is_anchor(save))
        peak = sum(stream.keep * stream.size for stream in streams) + anchored
        room = load * self.zones * self.zone_size - peak
        if room < 0:
            least = peak / (self.zones * self.zone_size)
            raise UsageError(f"{self.name}: a load of {load} is below the {least:.2f} of its saves")
        end = max((event.time for event in events), default=0.0) + 1.0
        anchors = tuple(self._anchors(room, chance))
        made = Workload(
            self.name,
            self.zone_size,
            self.zones,
            self.active,
            streams,
            anchors,
            tuple(events),
            end,
        )
        return self.bend(made, chance) if self.bend else made

    def _streams(self, chance: random.Random) -> tuple[Stream, ...]:
        count = len(self.keeps)
        low, high = self.sizes
        quarter = (high - low) / count
        sizes = [(low + quarter * (i + chance.random())) * self.zone_size for i in range(count)]
        if self.model:
            sizes = [float(sum(self._scaled()))] * count
        keeps, cadences = list(self.keeps), list(self.cadences)
        offsets = [cadence * i / count for i, cadence in enumerate(cadences)]
        late = list(self.late or [0.0] * count)
        for column in (sizes, keeps, offsets):
            chance.shuffle(column)
        if len(set(cadences)) > 1:
            chance.shuffle(cadences)
            offsets = [chance.uniform(0, cadence) for cadence in cadences]
        chance.shuffle(late)
        return tuple(map(Stream, keeps, cadences, offsets, sizes, late))

    def _anchors(self, room: float, chance: random.Random) -> list[int]:
        low, high = self.sizes if self.sizes[1] > 1 else (0.74, 2.27)
        anchors = []
        while room >= BLOCK:
            size = min(room, chance.uniform(low, high) * self.zone_size)
            anchors.append(-(-int(size) // BLOCK) * BLOCK)
            room -= size
        return anchors

    def _events(self, streams: Sequence[Stream], chance: random.Random) -> list[Save | Delete]:
        times = [
            (time, index) for index, s in enumerate(streams) for time in self._times(s, chance)
        ]
        events: list[Save | Delete] = []
        done: list[list[Save]] = [[] for _ in streams]
        for generation, (time, index) in enumerate(sorted(times)[: self.saves]):
            stream = streams[index]
            number = len(done[index])
            hint = time + stream.cadence * stream.keep
            if self.grid:
                hint = math.ceil(hint / self.grid) * self.grid
            if self.milestone_every and number % self.milestone_every == 0:
                hint = math.inf
            save = Save(time, index, generation, self._shards(stream.size, chance), hint)
            events.append(save)
            done[index].append(save)
            if number >= stream.keep and not _is_anchor(done[index][number - stream.keep]):
                late = stream.late + chance.uniform(0, self.late_most)
                events.append(Delete(time + late, done[index][number - stream.keep].generation))
        return sorted(events, key=lambda e: (e.time, isinstance(e, Delete), e.generation))

    def _times(self, stream: Stream, chance: random.Random) -> list[float]:
        count = math.ceil(2 * self.saves / len(self.keeps)) + 1
        if self.poisson:
            times, time = [], stream.offset
            for _ in range(count):
                times.append(time)
                time += chance.expovariate(1 / stream.cadence)
            return times
        spread = self.cadence_jitter
        times = [
            stream.offset + stream.cadence * i + (chance.uniform(-spread, spread) if spread else 0)
            for i in range(count)
        ]
        return sorted(max(0.0, time) for time in times)

    def _scaled(self) -> tuple[int, ...]:
        """Shards of the model: with other zones than the drive's they grow or shrink with these."""
        return tuple(-(-shard * self.zone_size // DRIVE_ZONE) for shard in self.model)

    def _shards(self, mean: float, chance: random.Random) -> tuple[int, ...]:
        if self.model:
            return self._scaled()
        size = mean * chance.uniform(1 - self.size_jitter, 1 + self.size_jitter)
        parts = [chance.uniform(*SHARD_SPREAD) for _ in range(SHARDS)]
        whole = sum(parts)
        return tuple(int(size * part / whole) for part in parts)


def _is_anchor(save: Save) -> bool:
    return math.isinf(save.hint)


def _training(name: str, keeps: tuple[int, ...], saves: int = 250) -> Family:
    """Jobs that train one model, side by side. What they keep is 0.65 of the zones, so that a load
    above that has anchors."""
    shards = MODELS[name]
    return Family(
        name,
        keeps=keeps,
        cadences=(4.0,) * len(keeps),
        zones=math.ceil(sum(keeps) * sum(shards) / (0.65 * DRIVE_ZONE)),
        active=14,
        zone_size=DRIVE_ZONE,
        model=shards,
        saves=saves,
    )


PAPER: Final = Family("paper")
FAMILIES: Final[dict[str, Family]] = {
    family.name: family
    for family in (
        PAPER,
        Family("mixed", keeps=(3, 4, 4, 6), cadences=(3.0, 4.0, 5.0, 6.0)),
        Family("small", keeps=(6, 8, 10, 12), sizes=(0.1, 0.5)),
        replace(PAPER, name="grid4", inputs="paper", grid=4.0),
        replace(PAPER, name="grid16", inputs="paper", grid=16.0),
        replace(PAPER, name="late", inputs="paper", late=(0.0, 2.0, 4.0, 8.0)),
        replace(PAPER, name="late-random", inputs="paper", late_most=8.0),
        replace(PAPER, name="jitter", cadence_jitter=2.0),
        replace(PAPER, name="sizes", size_jitter=0.3),
        replace(PAPER, name="poisson", poisson=True),
        replace(PAPER, name="milestones", milestone_every=5, zones=150),
        _training("smollm2-135m", (2, 4, 5, 7)),
        _training("pythia-1b", (2, 4, 5, 7)),
        _training("llama-70b-64", (2, 3), saves=60),  # each takes 750 zones
        replace(
            PAPER,
            name="large",
            keeps=(2, 3, 4, 5, 6, 7) * 2,
            cadences=(12.0,) * 12,
            zones=900,
            active=14,
            saves=600,
        ),
    )
}
