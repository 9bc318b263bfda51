"""The run of `scripts/capacity`, a thousandth as large: what it does, and that it would notice."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import pytest
from capacity_run import Difference, Run, Saver, main, parse, replayed, report
from capacity_shards import PARAMETERS, node

from retainzfs.layout import stored
from tests.simulation import deterministic

pytestmark = pytest.mark.volume

SAVES = 40  # from the 28th on every job has all that it keeps
SHRINK = "2048"


def arguments(*more: str) -> argparse.Namespace:
    return parse(["--shrink", SHRINK, "--saves", str(SAVES), *more])


@pytest.fixture(scope="module")
def run() -> Run:
    """One that is over."""
    made = Run(arguments("--policy", "plan"))
    deterministic(made.args.seed, made.run)
    return made


def kept(run: Run) -> list[int]:
    """Sizes of the files that are retained in the end."""
    jobs = (*run.jobs, run.anchors)
    return [size for job in jobs for save in job.kept for _, size, _ in job.files[save]]


def test_the_shards_are_those_of_the_published_model() -> None:
    assert PARAMETERS == 1_011_781_632
    first, second = list(node(0)), list(node(1))
    weights = [shard for shard in first if shard.name.startswith("layer")]
    states = [shard for shard in first if shard.name.startswith("zero")]
    assert len(weights) == 19
    assert sum(shard.size for shard in weights) == pytest.approx(2 * PARAMETERS, rel=1e-4)
    assert sum(shard.size for shard in states) == pytest.approx(12 * PARAMETERS / 8, rel=1e-4)
    assert [shard.size for shard in second] == [shard.size for shard in states]
    assert {shard.name for shard in second}.isdisjoint(shard.name for shard in first)


def test_all_saves_are_done_and_all_that_is_retained_is_read_twice(run: Run) -> None:
    result = run.result
    assert (result.saves, result.exhausted) == (SAVES, "")
    assert result.lost > 0
    assert [len(job.kept) for job in run.jobs] == [job.keep for job in run.jobs]
    assert result.verified > result.retained == sum(kept(run))
    # Padding and trailers count in the load.
    assert sum(map(stored, kept(run))) == pytest.approx(0.84 * run.room, rel=1e-3)
    assert result.overhead_zones


def test_the_figures_follow_from_the_arguments(run: Run) -> None:
    again = replayed(arguments("--policy", "plan"))
    measured = dict.fromkeys(("seconds", "verify_seconds", "memory"), 0.0)
    assert asdict(again) | measured == asdict(run.result) | measured


def test_a_run_without_enough_space_says_so_and_verifies_the_rest() -> None:
    run = Run(arguments())
    run.anchored = run.room * 3 // 4  # the jobs need more than the rest
    found = deterministic(1, run.run)
    assert found.exhausted.startswith("job")
    assert found.saves < SAVES
    assert found.verified == 2 * found.retained == 2 * sum(kept(run))
    assert sum(map(stored, kept(run))) > run.anchored
    assert "then no space" in report(found)


def test_a_file_that_is_another_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Saver.save

    async def wrong(self: Saver, number: int, run: Run) -> None:
        await save(self, number, run)
        name, size, key = self.files[number][0]
        self.files[number][0] = (name, size, key + 1)

    monkeypatch.setattr(Saver, "save", wrong)
    with pytest.RaisesGroup(Difference, allow_unwrapped=True, flatten_subgroups=True):
        deterministic(1, Run(arguments()).run)


def test_a_load_below_what_the_jobs_keep_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shrink", SHRINK, "--load", "0.1"]) == 2
    assert "a load of 0.1 is below the 0." in capsys.readouterr().err
