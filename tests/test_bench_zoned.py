"""The workload and the tables of `scripts/bench zoned`; no machine is started."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from bench_zoned import parse, report
from bench_zoned_workload import Stream, Workload, plan

pytestmark = pytest.mark.pure

MIB = 1 << 20
CAPACITY, ZONE = 512 * MIB, 4 * MIB
LOADS = [0.6, 0.8, 0.9]
SEEDS = range(1, 9)


def planned(seed: int) -> Workload:
    return plan(seed, CAPACITY, ZONE, LOADS, 0.3)


def test_a_seed_says_everything() -> None:
    assert planned(3) == planned(3)
    assert planned(3) != planned(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_streams_differ_in_what_they_keep_and_how_often_they_save(seed: int) -> None:
    streams = planned(seed).streams
    for values in ("keep", "cadence", "size"):
        assert len({getattr(stream, values) for stream in streams}) == len(streams)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_live_bytes_never_exceed_the_load_and_nearly_reach_it(seed: int) -> None:
    workload = planned(seed)
    live: dict[Stream, deque[int]] = {stream: deque() for stream in workload.streams}
    milestones = 0
    peak = 0
    for phase in workload.phases:
        milestones += sum(save.size for save in phase.milestones)
        for save in phase.saves:
            live[save.stream].append(save.size)
            now = milestones + sum(sum(sizes) for sizes in live.values())
            peak = max(peak, now)
            assert now <= (phase.load or LOADS[0]) * CAPACITY
            if len(live[save.stream]) > save.stream.keep:
                live[save.stream].popleft()
    assert peak > 0.97 * LOADS[-1] * CAPACITY


@pytest.mark.parametrize("seed", SEEDS)
def test_every_stream_has_what_it_keeps_before_anything_is_measured(seed: int) -> None:
    filling, *measured = planned(seed).phases
    assert filling.load is None
    for stream in planned(seed).streams:
        assert sum(save.stream == stream for save in filling.saves) >= stream.keep
    for phase in measured:
        assert sum(save.size for save in phase.saves) >= 0.3 * CAPACITY


def test_saves_that_alone_exceed_the_load_are_refused() -> None:
    with pytest.raises(ValueError, match="more than the load"):
        plan(1, CAPACITY, ZONE, [0.2], 0.3)


def phase(system: str, **fields: Any) -> dict[str, Any]:
    return {
        "system": system,
        "seed": 1,
        "event": "phase",
        "load": 0.6,
        "asked": 3,
        "saves": 3,
        "failures": [],
        "written": 100 * ZONE,
        "zoned": 101 * ZONE,
        "conventional": 0,
        "resets": 90,
        "durable_s": [1.0, 1.0, 2.0],
        **fields,
    }


def test_the_report_shows_ratios_and_failures() -> None:
    args = parse(["--systems", "retainzfs,f2fs", "--loads", "60,80"])
    records: list[dict[str, Any]] = [
        {"system": "f2fs", "seed": 1, "event": "fresh", "available": CAPACITY * 3 // 4},
        phase("retainzfs"),
        phase(
            "f2fs",
            saves=2,
            zoned=150 * ZONE,
            conventional=10 * ZONE,
            durable_s=[0.5, 0.5],
            failures=["ENOSPC at 58%", "ENOSPC at 58%"],
        ),
        {"system": "retainzfs", "seed": 1, "event": "check", "right": 5 * MIB, "wrong": []},
        {"system": "f2fs", "seed": 1, "event": "check", "right": 4 * MIB, "wrong": ["run0/x"]},
    ]
    lines = report(args, records).splitlines()
    assert "| 60% | retainzfs | 3 of 3 | 1.010 | 1.010 | 0.90 | 1.00 | 1.00 |" in lines
    assert "| 60% | f2fs | 2 of 3 | 1.500 | 1.600 | 0.90 | 0.50 | 0.50 |" in lines
    assert "| 80% | f2fs | not reached | - | - | - | - | - |" in lines
    assert "| retainzfs | - | none | 5 MiB, all right |" in lines
    assert "| f2fs | 75.0% | ENOSPC at 58% | 4 MiB, wrong files: 1 |" in lines


@pytest.mark.parametrize("loads", ["80,60", "0", "100", "x"])
def test_loads_are_rising_percentages(loads: str) -> None:
    with pytest.raises(SystemExit):
        parse(["--loads", loads])
