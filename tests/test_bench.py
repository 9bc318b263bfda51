"""`retainzfs bench`: what its figures say, and that it measures and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retainzfs import cli, mounts
from retainzfs.bench import picture
from retainzfs.bench.figures import Sheet, interleaved, quantile
from retainzfs.cli.bench import MEASURES

GOALS = 1  # exit code where a goal is missed, which at these sizes says nothing


@pytest.mark.pure
def test_a_ratio_is_of_medians_and_shows_how_far_repetitions_were_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sheet = Sheet()
    sheet.ratio("ours", [2.0, 4.0, 9.0], [1.0, 4.0, 3.0], goal=2.0)
    (figure,) = sheet.figures
    assert figure.value == pytest.approx(4 / 3)
    assert (figure.low, figure.high) == (1.0, 3.0)
    assert sheet.missed == [figure]
    line = capsys.readouterr().out
    assert line.split() == ["ours", "1.333", "x", "(1-3)", ">=", "2", "MISSED"]


@pytest.mark.pure
@pytest.mark.parametrize("floor", [True, False])
def test_a_goal_is_met_at_its_bound(*, floor: bool) -> None:
    sheet = Sheet()
    sheet.add("at the bound", 2.0, "s", 2.0, floor=floor)
    sheet.add("beyond", 1.9 if floor else 2.1, "s", 2.0, floor=floor)
    assert [figure.met for figure in sheet.figures] == [True, False]


@pytest.mark.pure
def test_all_targets_are_measured_in_turn() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = interleaved(2, {"a": lambda: measure("a"), "b": lambda: measure("b")})
    assert order == ["a", "b", "a", "b"]
    assert samples == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


@pytest.mark.pure
def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [0, 50, 99, 99]


@pytest.mark.pure
def test_unknown_measures_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", str(tmp_path), "speed"]) == 2
    assert f"no measure 'speed'; known: {', '.join(MEASURES)}" in capsys.readouterr().err
    assert cli.main(["bench", str(tmp_path), "write", "--repetitions", "0"]) == 2
    assert cli.main(["bench", str(tmp_path), "write", "--size", "900T"]) == 2
    assert "9 times --size is needed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.pure
def test_what_would_fail_in_the_end_is_said_in_the_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--json", "--png"):
        assert (
            cli.main(["bench", str(tmp_path), "write", option, str(tmp_path / "no" / "out")]) == 2
        )
        assert f"{option} {tmp_path}/no/out: there is no directory" in capsys.readouterr().err


@pytest.mark.pure
def test_ratios_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: scripts/setup-environment test")
    sheet = Sheet()
    sheet.add("no ratio", 1.0, "s")
    sheet.ratio("met", [2.0, 2.5], [1.0, 1.0], 1.5)
    sheet.ratio("missed", [0.5], [1.0], 0.9)
    picture.draw(sheet.figures, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.fuse
@pytest.mark.parametrize("measure", ["write", "latency", "durable", "arrays", "tools"])
def test_it_measures_and_leaves_nothing_behind(tmp_path: Path, measure: str) -> None:
    disk, out = tmp_path / "disk", tmp_path / "out.json"
    disk.mkdir()
    options = ["--size", "64M", "--repetitions", "1", "--json", str(out)]
    assert cli.main(["bench", str(disk), measure, *options]) in (0, GOALS)
    told = json.loads(out.read_text())
    assert told["figures"], told["left_out"]
    assert all(figure["value"] > 0 for figure in told["figures"])
    assert {"processors", "kernel", "load"} <= told["machine"].keys()
    assert list(disk.iterdir()) == []
    assert not [mount for mount in mounts.ours() if str(disk) in str(mount.directory)]
