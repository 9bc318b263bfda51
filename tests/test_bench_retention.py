"""The replay of `scripts/bench retention`: what its jobs do, and what the volume makes of it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import trio
from bench_retention import Result, main, replayed
from bench_retention_frameworks import FRAMEWORKS, Job, enter

from retainzfs.device import Geometry
from retainzfs.device.memory import MemoryDevice
from retainzfs.lifetimes import is_tracker, number_in, recognise, series_of
from retainzfs.volume import Volume
from tests.helpers import formatted, mounted
from tests.simulation import deterministic, options

pytestmark = pytest.mark.volume

KEEP = 3
SAVES = 12
SIZE = 200_000


def numbers(volume: Volume, ino: int) -> set[int]:
    """Return the numbers of the generations in a job's directory, by the names alone."""
    found: set[int] = set()
    for name, child in volume.entries(ino):
        match = recognise([name])
        if is_tracker(name):
            continue
        if match is not None:
            found.add(match.number)
        elif series_of(name) is not None:
            found.add(number_in(name))
        else:
            found |= numbers(volume, child)
    return found


def nbytes(volume: Volume, ino: int) -> int:
    inode = volume.inode(ino)
    return inode.size + sum(nbytes(volume, child) for child in (inode.entries or {}).values())


async def saved(name: str) -> tuple[Job, set[int], int]:
    """Let one job save; return the generations and the bytes that are left."""
    framework = FRAMEWORKS[name]
    every = 5 if framework.milestones else 0
    job = Job("job", KEEP, every, framework.stride, 60.0, SIZE, 5.0)
    device = await formatted(MemoryDevice(Geometry(1 << 20, 1 << 20, 24, 8, 14)))
    async with mounted(device, options()) as volume:
        await enter(job, volume, "none")
        for count in range(1, SAVES + 1):
            await framework.save(job, count * job.stride)
            await trio.sleep(55.0)
        return job, numbers(volume, job.top), nbytes(volume, job.top)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_job_keeps_the_newest_and_milestones_and_deletes_the_rest(name: str) -> None:
    job, left, held = deterministic(1, saved, name)
    framework = FRAMEWORKS[name]
    newest = range(SAVES - KEEP - framework.lag + 1, SAVES + 1)
    milestones = {5, 10} if framework.milestones else set()
    expected = {count * job.stride for count in {*newest, *milestones}}
    assert left == expected == set(job.kept)
    every = {count * job.stride for count in range(1, SAVES + 1)}
    assert set(job.deleted) == every - expected
    assert held == pytest.approx((len(expected) + framework.extra) * SIZE, rel=0.15)


def test_a_seed_says_everything() -> None:
    one, other, third = (replayed("huggingface", "none", seed, 60) for seed in (1, 1, 2))
    assert repr(one) == repr(other) != repr(third)


# With the reason why it is in the list.
HARD = [
    "deepspeed",  # only the tracker tells that a save is complete, also after the remount
    "accelerate",  # nothing tells, and the oldest goes before the newest comes
    "torchtitan-async",  # one more is kept than keep_last says
    "unknown directories",  # no name tells
]


@pytest.mark.parametrize("name", HARD)
def test_without_attributes_streams_learn_what_attributes_would_have_said(name: str) -> None:
    told, untold = (replayed(name, knows, 1, 160) for knows in ("attributes", "none"))
    assert told.deleted == untold.deleted, "the same was replayed"
    assert not untold.hinted_early
    assert told.hinted == 1
    assert told.near > 0.95
    assert untold.hinted >= 0.95
    assert untold.near >= told.near - 0.05
    assert untold.overhead_zones < told.overhead_zones + 1
    assert untold.write_amplification < told.write_amplification + 0.05


def test_milestones_are_told_from_their_neighbours_once_two_were_kept() -> None:
    told, untold = (replayed("megatron", knows, 1, 160) for knows in ("declared", "none"))
    assert told.milestones == untold.milestones == 1
    assert untold.overhead_zones > told.overhead_zones + 1, "the first two were taken for others"


def test_the_json_has_every_figure_of_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.json"
    arguments = ["--framework", "composer", "--seeds", "1", "--saves", "60", "--json", str(out)]
    assert main(arguments) == 0
    runs = json.loads(out.read_text())
    assert [run["knows"] for run in runs] == ["declared", "attributes", "none"]
    assert {key for run in runs for key in run} == {field.name for field in fields(Result)}
    assert runs[0]["milestones"] is None, "a composer has none"
    assert asdict(replayed("composer", "none", 1, 60))["resets"] == runs[2]["resets"]
    printed = capsys.readouterr().out
    assert printed.count("| composer |") == 3


@pytest.mark.parametrize("arguments", [["--saves", "5"], ["--seeds", "0"], ["--framework", "x"]])
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err
