"""Saves on a device that is nearly full, with jobs that keep their newest and delete the rest."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Final

from retainzfs.bench import targets
from retainzfs.bench.figures import quantile
from retainzfs.bench.targets import MIB, Bench

SIZE: Final = 1 << 30  # bytes of the image
LOAD: Final = 0.84  # of its room for data, that lives at the most
KEEPS: Final = (2, 4, 5, 7)
SAVES: Final = 60  # of each job
SHARDS: Final = 8
SPREAD: Final = 0.3  # of a shard's size, to either side


def bench_pressure(bench: Bench) -> None:
    """The latency of a shard's durable close at 84 % of the room."""
    chance = random.Random(0)
    with targets.retainzfs(bench, "pressure", SIZE) as ours:
        room = ours.stats()["capacity"]
        # At the peak each job has one more than it keeps.
        shard = LOAD * room / SHARDS / (sum(KEEPS) + 1)
        noise = memoryview(os.urandom(int(2 * shard)))
        jobs = [ours.path / f"job{chr(97 + number)}" for number in range(len(KEEPS))]
        for job in jobs:
            job.mkdir()
        waits = []
        for step in range(1, SAVES + 1):
            for job, keep in zip(jobs, KEEPS, strict=True):
                generation = job / f"step-{step}"
                generation.mkdir()
                for number in range(SHARDS):
                    size = int(shard * chance.uniform(1 - SPREAD, 1 + SPREAD))
                    waits.append(_close(generation / f"shard-{number}.bin", noise[:size]))
                if step > keep:
                    _delete(job / f"step-{step - keep}")
        stats = ours.stats()
    steady = waits[len(waits) // 4 :]  # the device is full by then
    p50 = quantile(steady, 0.5)
    bench.sheet.add("commit at 84 %: p50", p50, "ms")
    bench.sheet.add(
        "commit at 84 %: p99 of p50", quantile(steady, 0.99) / p50, "x", 3.0, floor=False
    )
    bench.sheet.add("commit at 84 %: p99.9 of p50", quantile(steady, 0.999) / p50, "x")
    bench.sheet.add("commit at 84 %: write amplification", stats["write_amplification"], "x")
    bench.sheet.add("commit at 84 %: shard", shard / MIB, "MiB")


def _close(path: Path, data: memoryview) -> float:
    """Write a shard; milliseconds from its last byte until its close has made it durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    while data:
        data = data[os.write(descriptor, data) :]
    started = time.perf_counter()
    os.close(descriptor)
    return 1e3 * (time.perf_counter() - started)


def _delete(generation: Path) -> None:
    for path in generation.iterdir():
        path.unlink()
    generation.rmdir()
