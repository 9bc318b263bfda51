"""The checkpoints that `bench_zoned.py` writes: four trainers, told apart by how long saves live.

Pure functions of a seed. The peak of what lives at any moment, the save being written included, is
the load times the namespace's capacity: milestones that are never deleted make up the difference.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass

KEEPS = (2, 4, 5, 7)
CADENCES = (3, 4, 5, 6)  # epochs between two saves of a stream
ZONES_MIN, ZONES_MAX = 1.2, 3.6  # size of a generation, in zones: each stream has its own quarter
SIZE_JITTER = 0.02
SHARDS = 8
SHARD_JITTER = 0.3
BLOCK = 4096
METADATA_SIZE = 2 * BLOCK  # the file that completes a generation


@dataclass(frozen=True)
class Stream:
    """One trainer: it saves every `cadence` epochs, and then deletes the save `keep` before."""

    name: str
    keep: int
    cadence: int
    offset: int  # epochs until its first save
    size: int  # mean of a generation

    @property
    def lifetime(self) -> int:
        """Epochs from a save to its deletion."""
        return self.keep * self.cadence


@dataclass(frozen=True)
class Save:
    """A generation: a directory of shards and, last, a file of metadata."""

    stream: Stream
    number: int
    shards: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.shards) + METADATA_SIZE


@dataclass(frozen=True)
class Phase:
    """Saves at one load; `load` is None while the namespace is filled, which counts for nothing."""

    load: float | None
    milestones: tuple[Save, ...]  # written before the saves
    saves: tuple[Save, ...]


@dataclass(frozen=True)
class Workload:
    streams: tuple[Stream, ...]
    milestones: Stream
    phases: tuple[Phase, ...]


def plan(seed: int, capacity: int, zone: int, loads: list[float], turnover: float) -> Workload:
    """Plan a namespace of `capacity`: it is filled, and at each load `turnover` times rewritten."""
    chance = random.Random(seed)
    streams = _streams(chance, zone)
    saves = _Saves(chance, streams)
    filling = saves.until_kept()
    phases = [saves.until_written(turnover * capacity) for _ in loads]
    peak = _peak([*filling, *(save for phase in phases for save in phase)])
    milestones = Stream("milestones", 0, 0, 0, (sum(s.size for s in streams)) // len(streams))
    room = [max(0, int(load * capacity) - peak) for load in loads]
    if not room[0]:
        raise ValueError(f"{peak} bytes of saves alone are more than the load of {loads[0]}")
    grown = [room[0], *(after - before for before, after in itertools.pairwise(room))]
    kept = _milestones(chance, milestones, grown)
    planned = [Phase(None, kept[0], tuple(filling))]
    for load, more, phase in zip(loads, [(), *kept[1:]], phases, strict=True):
        planned.append(Phase(load, more, tuple(phase)))
    return Workload(tuple(streams), milestones, tuple(planned))


def _streams(chance: random.Random, zone: int) -> list[Stream]:
    keeps, cadences, quarters = (chance.sample(values, 4) for values in (KEEPS, CADENCES, range(4)))
    step = (ZONES_MAX - ZONES_MIN) / 4
    streams = []
    for index in range(4):
        zones = ZONES_MIN + step * (quarters[index] + chance.random())
        offset = chance.randrange(cadences[index])
        size = int(zones * zone)
        streams.append(Stream(f"run{index}", keeps[index], cadences[index], offset, size))
    return streams


def _save(chance: random.Random, stream: Stream, number: int, size: int) -> Save:
    weights = [1 + chance.uniform(-SHARD_JITTER, SHARD_JITTER) for _ in range(SHARDS)]
    unit = size / sum(weights)
    return Save(stream, number, tuple(max(BLOCK, int(unit * weight)) for weight in weights))


class _Saves:
    """The endless row of saves."""

    def __init__(self, chance: random.Random, streams: list[Stream]) -> None:
        self.chance = chance
        self.streams = streams
        self.epoch = 0
        self.numbers = dict.fromkeys((stream.name for stream in streams), 0)

    def _of_next_epoch(self) -> list[Save]:
        saves = []
        for stream in self.streams:
            if self.epoch % stream.cadence == stream.offset:
                number = self.numbers[stream.name] = self.numbers[stream.name] + 1
                size = stream.size * (1 + self.chance.uniform(-SIZE_JITTER, SIZE_JITTER))
                saves.append(_save(self.chance, stream, number, int(size)))
        self.epoch += 1
        return saves

    def until_kept(self) -> list[Save]:
        """Return saves until every stream has as many as it keeps."""
        saves: list[Save] = []
        while any(self.numbers[stream.name] < stream.keep for stream in self.streams):
            saves += self._of_next_epoch()
        return saves

    def until_written(self, size: float) -> list[Save]:
        saves: list[Save] = []
        while sum(save.size for save in saves) < size:
            saves += self._of_next_epoch()
        return saves


def _peak(saves: list[Save]) -> int:
    """Return the most that lives at any moment."""
    kept: dict[str, deque[int]] = {}
    live = peak = 0
    for save in saves:
        sizes = kept.setdefault(save.stream.name, deque())
        live += save.size
        peak = max(peak, live)
        sizes.append(save.size)
        if len(sizes) > save.stream.keep:
            live -= sizes.popleft()
    return peak


def _milestones(chance: random.Random, stream: Stream, sizes: list[int]) -> list[tuple[Save, ...]]:
    """Return, for each of the sizes, milestones that take so many bytes."""
    number = 0
    result: list[tuple[Save, ...]] = []
    for size in sizes:
        saves: list[Save] = []
        left = size
        while left > METADATA_SIZE + SHARDS * BLOCK:
            number += 1
            save = _save(chance, stream, number, min(stream.size, left - METADATA_SIZE))
            saves.append(save)
            left -= save.size
        result.append(tuple(saves))
    return result
