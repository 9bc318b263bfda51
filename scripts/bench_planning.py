#!/usr/bin/env python3
"""Time to plan one generation, by the number of zones in the table; to place one run by a plan.

The survey of the table is included. A policy looks at partial zones only, so planning costs by the
number of active ones, and not by the size of the device. It is processor time.

    scripts/bench planning [POLICY ...]
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import trio

from retainzfs.layout import BLOCK
from retainzfs.placement import Arrival, Request, policy, survey
from retainzfs.volume import ROOT, Options
from retainzfs.zone import Kind
from retainzfs.zones import ZoneTable
from tests.helpers import DIRECTORY, formatted, mounted, put, small_device

CAPACITY = 4 << 20
LEDGER = 3  # active zones that the journal and collection keep for themselves
BARS_MS = {6: 0.3, 14: 1.0}  # by active zones
RUN_BAR_MS = 0.05
FLAT = 2.0  # times the cost at the fewest zones
PLANS = 2000
ZONES = 1000  # of the volume that runs go to
RUNS = 8  # that a zone takes
SIZES = (64, 1000, 100_000)
# Four that keep 2, 4, 5 and 7, as in the workload `paper`.
STREAMS = [Arrival(9.0 + i, 4.0 * keep, 6 << 20, 4.0) for i, keep in enumerate((2, 4, 5, 7))]


def crowded(count: int, active: int) -> ZoneTable:
    """Half of the zones full, and as many partial finite ones as may be active."""
    table = ZoneTable(CAPACITY, count, active + LEDGER, 0, metadata=range(4))
    full = count // 2 - active
    for gid in range(full + active):
        zone = table.acquire(Kind.FINITE)
        assert zone is not None, "the ledger is full before its time"
        share = 1.0 if gid < full else (gid - full + 1) / (active + 2)
        nbytes = int(CAPACITY * share) // (4 * BLOCK) * 4 * BLOCK
        table.reserve(zone, nbytes)
        for other in range(4):
            table.add_live(zone, gid + other, nbytes // 4)
        table.written(zone, nbytes)
    return table


def planning(name: str, count: int, active: int) -> list[float]:
    """Milliseconds of each plan."""
    table = crowded(count, active)
    rule = policy(name)
    request = Request(size=9 << 20, retire=24.0)
    times_ms = []
    for _ in range(PLANS):
        start = time.thread_time_ns()
        view = survey(table, Kind.FINITE, lambda gid: 10.0 + gid % 16, 8.0, arrivals=STREAMS)
        plan = rule.plan(request, view)
        times_ms.append((time.thread_time_ns() - start) / 1e6)
    assert not plan.unplaced, "the generation does not fit; the time means nothing"
    assert len(view.zones) == active, "the view is not the one to be measured"
    return times_ms


async def placing(name: str) -> list[float]:
    """Milliseconds until a run of a planned generation knows its zone, in a volume where nobody
    else has anything to do. Nothing is written: the table is told so."""
    device = await formatted(small_device(zones=ZONES))
    times_ms: list[float] = []
    async with mounted(device, policy=name) as volume:
        run = await volume.make(ROOT, b"run", DIRECTORY, 0, 0)
        await volume.setxattr(run.ino, b"user.retainz.keep_last", b"1")
        ino = await put(volume, run.ino, b"step-1.pt", bytes(volume.table.capacity))
        lanes, lane, table = volume.lanes, volume.lane(volume.inode(ino)), volume.table
        await volume.fsync(ino)
        request = lanes.request(lane, lanes.hint(lane), ZONES // 2 * table.capacity)
        lanes.carry_out(lane, request, lanes.policy.plan(request, lanes.view(Kind.FINITE)))
        while lane.steps:
            start = time.thread_time_ns()
            place = await lanes.claim(lane, table.capacity // BLOCK // RUNS)
            times_ms.append((time.thread_time_ns() - start) / 1e6)
            table.written(place.zone, place.zone.reserved)
    return times_ms


def show(what: str, zones: int, active: int, times_ms: list[float], bar_ms: float) -> bool:
    """Print a line; return whether the median is within the bar."""
    median_ms = statistics.median(times_ms)
    p99_ms = statistics.quantiles(times_ms, n=100)[98]
    met = median_ms <= bar_ms
    missed = "" if met else "  MISSED"
    print(
        f"{what:<20}{zones:>8}{active:>8}{median_ms:>12.4f}{p99_ms:>10.4f}   <= {bar_ms:g}{missed}"
    )
    return met


def main() -> int:
    met = True
    print(f"{'policy':<20}{'zones':>8}{'active':>8}{'median ms':>12}{'p99 ms':>10}   bar")
    for name in sys.argv[1:] or [Options().policy]:
        for active, bar_ms in BARS_MS.items():
            medians = []
            for count in SIZES:
                times_ms = planning(name, count, active)
                medians.append(statistics.median(times_ms))
                met &= show(name, count, active, times_ms, bar_ms)
            flat = max(medians) / min(medians)
            met &= flat <= FLAT
            print(f"{name}: {flat:.2f} times from one size to another   <= {FLAT:g}")
        times_ms = trio.run(partial(placing, name))
        met &= show(f"{name}: a run", ZONES, 1, times_ms, RUN_BAR_MS)
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
