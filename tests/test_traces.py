"""Recorded traces: what is written, what is read, and the workload that they become."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retainzfs import cli, layout, placement, replay_target
from retainzfs.chronicle import NOTES_MOST, Chronicle
from retainzfs.device import Geometry
from retainzfs.errors import MountError, UsageError
from retainzfs.evaluation import models, trace
from retainzfs.evaluation.simulator import Simulator
from retainzfs.evaluation.trace import Generation, Trace
from retainzfs.evaluation.workload import DRIVE_ZONE, FAMILIES, Delete, Save
from retainzfs.placement.admission import RULES
from retainzfs.recording import Recorder
from retainzfs.streams import Stream
from tests.conftest import COMMAND, COMMAND_S, Live, wait_until

KIB, MIB = 1 << 10, 1 << 20


def row(**changes: Any) -> dict[str, Any]:
    plain = {"stream": "/run/step-", "number": 1, "born": 10.0, "files": [MIB], "retire": None}
    return plain | {"deleted": None, "complete": True, "reaped": False} | changes


def written(rows: Iterable[dict[str, Any]], start: float = 0.0, end: float = 1000.0) -> list[bytes]:
    rows = list(rows)
    lines = [trace.header(start, 4 * MIB, 50, 6), *map(trace.line, rows)]
    return [text.encode() for text in (*lines, trace.end(end, len(rows)))]


def parsed(rows: Iterable[dict[str, Any]], start: float = 0.0, end: float = 1000.0) -> Trace:
    return trace.parse(written(rows, start, end), "t")


def saves(
    stream: str, cadence: float, keep: int, size: int, count: int = 20, first: float = 0.0
) -> list[dict[str, Any]]:
    """Rows of a trainer that saves and deletes like clockwork; the kept ones have no deletion."""
    return [
        row(
            stream=stream,
            number=number,
            born=first + number * cadence,
            files=[size],
            retire=first + (number + keep) * cadence,
            deleted=first + (number + keep) * cadence if number + keep < count else None,
        )
        for number in range(count)
    ]


times = st.floats(-1e6, 1e9).map(lambda value: round(value, 3))


@st.composite
def generations(draw: st.DrawFn) -> dict[str, Any]:
    born = draw(times)
    return row(
        stream=draw(st.sampled_from(["/a/step-", "/b/model-", "/ \n/é#"])),
        number=draw(st.integers(0, 1 << 40)),
        born=born,
        files=draw(st.lists(st.integers(0, 1 << 34), max_size=4)),
        retire=draw(st.none() | st.just("inf") | times),
        deleted=draw(st.none() | st.floats(0, 1e6).map(lambda life: round(born + life, 3))),
        complete=draw(st.booleans()),
        reaped=draw(st.booleans()),
    )


@pytest.mark.pure
@given(st.lists(generations(), min_size=1, max_size=8), times)
def test_what_is_written_is_read(rows: list[dict[str, Any]], start: float) -> None:
    found = parsed(rows, start, 2e9)
    assert (found.start, found.end) == (start, 2e9)
    assert (found.zone_capacity, found.zones, found.active) == (4 * MIB, 50, 6)
    expected = []
    for one in rows:
        values = {**one, "files": tuple(one["files"])}
        values["retire"] = math.inf if one["retire"] == "inf" else one["retire"]
        expected.append(Generation(**values))
    assert sorted(map(repr, found.generations)) == sorted(map(repr, expected))


@pytest.mark.pure
@given(st.lists(generations(), min_size=1, max_size=8), st.floats(0.1, 1.0))
def test_every_trace_is_a_workload(rows: list[dict[str, Any]], load: float) -> None:
    found = parsed(rows, 0.0, 2e9)
    if not any(sum(one["files"]) for one in rows):
        with pytest.raises(UsageError, match="empty"):
            trace.workload(found, load=load)
        return
    made = trace.workload(found, load=load)
    whole = [one for one in rows if sum(one["files"])]
    assert made.saves + len(made.anchors) == len(whole)
    assert [event.time for event in made.events] == sorted(event.time for event in made.events)
    alive: set[int] = set()
    for event in made.events:
        if isinstance(event, Save):
            alive.add(event.generation)
            assert event.hint >= event.time + 1
            assert made.streams[event.stream].keep >= 1
        else:
            alive.remove(event.generation)
    peak = sum(made.anchors) + trace.peak_of(made.events)
    assert peak <= load * made.zones * made.capacity
    assert made.end > made.warm_up >= 0


@pytest.mark.pure
def test_cadences_are_learned() -> None:
    large = saves("/large/step-", cadence=400.0, keep=2, size=8 * MIB)
    small = saves("/small/step-", cadence=100.0, keep=4, size=MIB, first=30.0)
    made = trace.workload(parsed(large + small, end=8000.0), load=0.5)
    # E is a quarter of the cadence of the one with the bytes: 100 s.
    assert [(s.keep, s.cadence, s.offset) for s in made.streams] == [(2, 4.0, 0.0), (4, 1.0, 0.3)]
    first = next(e for e in made.events if isinstance(e, Save))
    assert (first.time, first.hint, first.shards) == (0.0, 8.0, (8 * MIB,))
    assert sum(isinstance(e, Delete) for e in made.events) == 18 + 16
    # At the peak, when a third large one is saved, there are four small ones.
    assert made.zones == math.ceil((3 * 8 + 4) / 0.5 / 4)
    assert made.end == 81.0


@pytest.mark.pure
def test_what_was_there_before_is_there_at_the_beginning() -> None:
    rows = [
        row(stream="/kept/step-", born=-50.0, retire="inf"),
        row(stream="/run/step-", number=1, born=-10.0, deleted=90.0),
        row(stream="/run/step-", number=2, born=90.0),
        row(stream="/run/step-", number=3, born=190.0),
    ]
    made = trace.workload(parsed(rows))
    assert made.anchors == (MIB,)
    first, *_ = made.events
    assert isinstance(first, Save)
    assert first.time == 0.0
    assert first.hint == pytest.approx(90 / 25), "one cadence of 100 s behind its save"


@pytest.mark.pure
def test_a_trace_says_its_own_zones() -> None:
    found = parsed(saves("/run/step-", 100.0, 3, 3 * MIB))
    assert trace.workload(found, zones=12).zones == 12
    assert trace.workload(found, zone_size=MIB, load=0.75).zones == 16
    assert trace.workload(found, active=9).active == 9
    with pytest.raises(UsageError, match="3 zones of 4194304 hold less"):
        trace.workload(parsed(saves("/run/step-", 100.0, 9, 4 * MIB)), zones=3)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("index", "text", "said"),
    [
        (0, '{"zones":1}', "line 1: retainzfs_trace: missing"),
        (0, '{"retainzfs_trace":2,"start":0}', "line 1: retainzfs_trace: version 2"),
        (0, '{"retainzfs_trace":1,"start":"now"}', 'line 1: start: "now"'),
        (0, '{"retainzfs_trace":1,"start":0,"zones":9,"active":6}', "line 1: zone_capacity"),
        (1, "", "line 2: no JSON"),
        (1, "[1]", "line 2: no JSON object"),
        (1, json.dumps(row(stream=3)), "line 2: stream: 3"),
        (1, json.dumps(row(born=None)), "line 2: born: null"),
        (1, json.dumps(row(born=math.nan)), "line 2: born: NaN"),
        (1, json.dumps(row(files=[1, -1])), r"line 2: files: \[1, -1\]"),
        (1, json.dumps(row(files=[True])), r"line 2: files: \[true\]"),
        (1, json.dumps(row(retire="soon")), 'line 2: retire: "soon"'),
        (1, json.dumps(row(deleted=9.0)), "line 2: deleted: 9.0"),
        (1, json.dumps(row(number=1.5)), "line 2: number: 1.5"),
        (1, json.dumps(row(complete="yes")), 'line 2: complete: "yes"'),
        (2, '{"end":1,"generations":2}', "line 3: generations: 2; it is 1"),
        (3, json.dumps(row()), "line 4: behind the line that ends"),
    ],
)
def test_a_bad_trace_is_refused_by_line_and_field(index: int, text: str, said: str) -> None:
    lines = written([row()])
    lines[index : index + 1] = [text.encode()]
    with pytest.raises(UsageError, match=f"^some.jsonl, {said}"):
        trace.parse(lines, "some.jsonl")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=5,
)


@pytest.mark.pure
@given(st.integers(0, 3), st.sampled_from(sorted({*row(), "start", "zones", "end"})), json_values)
@settings(max_examples=100)
def test_any_field_may_hold_anything(index: int, name: str, value: Any) -> None:
    lines = written([row(), row(number=2, born=20.0)])
    lines[index] = json.dumps({**json.loads(lines[index]), name: value}).encode()
    with suppress(UsageError):  # read or refused, and nothing else happens
        trace.workload(trace.parse(lines, "t"))


@pytest.mark.pure
@given(st.integers(0, 3), st.binary(max_size=40))
def test_any_line_may_be_anything(index: int, text: bytes) -> None:
    lines = written([row(), row(number=2, born=20.0)])
    lines[index] = text
    with pytest.raises(UsageError, match=f"^t, line {index + 1}: "):
        trace.parse(lines, "t")


@pytest.mark.pure
def test_a_trace_without_its_end_is_read() -> None:
    found = trace.parse(written([row(deleted=70.0)])[:-1], "t")
    assert found.end == 70.0


# The command


def run(*arguments: str | Path) -> int:
    return cli.main(["replay", *map(str, arguments)])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A trace of 40 saves."""
    rows = saves("/a/step-", 100.0, 3, 5 * MIB) + saves("/b/step-", 100.0, 4, 3 * MIB, first=50.0)
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"".join(written(rows, end=2000.0)))
    return file


@pytest.mark.pure
def test_policies_are_compared_in_a_table(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", recorded, "--policy", "plan", "--policy", "zenfs", "--load", "0.8") == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    found = [dict(zip(head, row, strict=True)) for row in rows]
    assert [one["POLICY"] for one in found] == ["plan", "zenfs"]
    assert [one["SAVES"] for one in found] == ["40", "40"]
    for one in found:
        parts = float(one["INVALID"]) + float(one["TAIL"])
        assert float(one["OVERHEAD"]) == pytest.approx(parts, abs=0.011)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--zone-size 1M", "dev: its zones hold 262144 bytes; leave out --zone-size"),
        ("--zones 300", "dev: 96 zones for data, 300 are wanted"),
    ],
)
def test_a_device_has_the_zones_that_it_has(
    arguments: str,
    said: str,
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = Geometry(MIB, 256 * KIB, 100, 8, 14)
    monkeypatch.setattr(replay_target, "own_zones", lambda _target: own)
    assert run("run", recorded, "--device", "dev", *arguments.split()) == 2
    assert capsys.readouterr().err == f"retainzfs: {said}\n"


# What a mount notes


def record(generation: int, order: int = 1) -> layout.GenerationRecord:
    return layout.GenerationRecord(generation, 5, 7, 1.5, 9.0, 2.0, order, 1, 0, b"")


@pytest.mark.pure
def test_replaced_files_are_no_part_of_a_generation() -> None:
    chronicle, stream = Chronicle(), Stream(5, {b"step-"}, predicted={3: (math.inf, "")})
    chronicle.left(3, 100)  # renamed over before the save was complete
    chronicle.forget(3)
    chronicle.left(3, 40)
    chronicle.end(record(3), stream, "/run", [60], 12.25, reaped=False)
    [told] = chronicle.ended
    assert told["files"] == [60, 40]
    assert (told["stream"], told["number"], told["born"]) == ("/run/step-", 7, 1.5)
    assert (told["retire"], told["deleted"], told["complete"]) == ("inf", 12.25, True)


@pytest.mark.pure
def test_the_oldest_notes_go_and_are_still_counted() -> None:
    chronicle, stream = Chronicle(), Stream(5)
    for generation in range(NOTES_MOST + 5):
        chronicle.end(record(generation, 0), stream, "/", [1], 2.0, reaped=True)
    assert chronicle.count == NOTES_MOST + 5
    assert [told["id"] for told in chronicle.ended][:1] == [5]
    assert not chronicle.ended[0]["complete"]


# Models


@pytest.mark.pure
def test_shards_of_models_are_their_parameters() -> None:
    # As their model cards say.
    assert models.PYTHIA_1B.parameters == 1_011_781_632
    assert models.SMOLLM2_135M.parameters == 134_515_008
    assert models.LLAMA_70B.parameters == 70_553_706_496
    assert models.SHARDS["pythia-1b"] == (2 * 1_011_781_632, 8 * 1_011_781_632)
    ranks = models.SHARDS["llama-70b-64"]
    assert len(ranks) == 64
    assert sum(ranks) == 12 * 70_553_706_496
    assert len(set(ranks)) == 1, "64 divides every first dimension"


@pytest.mark.pure
def test_ranks_that_do_not_divide_a_tensor_have_a_shorter_end() -> None:
    model = models.Model("odd", ((10, 3), (2,)))
    # torch.chunk of 10 rows into 4: 3, 3, 3, 1; of 2 elements: 1, 1, and nothing.
    assert models.dcp(model, 4) == tuple(12 * n for n in (3 * 3 + 1, 3 * 3 + 1, 3 * 3, 3))


@pytest.mark.pure
@pytest.mark.parametrize("name", models.SHARDS)
def test_families_of_models_save_their_shards(name: str) -> None:
    family = FAMILIES[name]
    workload = family.make(0, 0.84)
    saved = [event for event in workload.events if isinstance(event, Save)]
    assert {save.shards for save in saved} == {models.SHARDS[name]}
    peak = sum(workload.anchors) + sum(s.keep * s.size for s in workload.streams)
    assert peak == pytest.approx(0.84 * family.zones * DRIVE_ZONE, rel=1e-6)


# On a mount


def train(root: Path, name: str, keep: int, steps: range, size: int) -> None:
    """Save and delete like a trainer with two ranks."""
    run = root / name
    run.mkdir(exist_ok=True)
    for step in steps:
        directory = run / f"step-{step}"
        directory.mkdir()
        for rank in range(2):
            (directory / f"__{rank}_0.distcp").write_bytes(bytes(size + step))
        (directory / ".metadata").write_bytes(b"whole")
        old = run / f"step-{step - keep}"
        if old.exists():
            shutil.rmtree(old)


@pytest.mark.fuse
def test_a_mount_is_recorded_and_replayed(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(room, "before", 3, range(1, 3), 40 * KIB)
    reaped = room / "reaped"
    reaped.mkdir()
    for name in ("keep_last", "reap"):
        os.setxattr(reaped, f"user.retainz.{name}", b"1")
    file = tmp_path / "trace.jsonl"
    with file.open("w") as out:
        recorder = Recorder(str(room), out)
        train(room, "run", 2, range(1, 9), 300 * KIB)
        recorder.poll()
        train(room, "run", 2, range(9, 11), 300 * KIB)
        shutil.rmtree(room / "before")  # the directory of a stream goes with all that is in it
        train(room, "other", 1, range(1, 3), 20 * KIB)
        train(room, "reaped", 99, range(1, 3), 30 * KIB)
        wait_until(lambda: not (reaped / "step-1").exists(), "nothing was reaped")
        recorder.end()
    found = trace.parse(file.read_bytes().splitlines(), "t")
    told = {(Path(g.stream).parent.name, g.number): g for g in found.generations}
    assert len(told) == len(found.generations) == recorder.generations
    steps = {"run": range(1, 11)} | dict.fromkeys(("before", "other", "reaped"), range(1, 3))
    assert set(told) == {(name, step) for name in steps for step in steps[name]}
    kept = {("run", 9), ("run", 10), ("other", 2), ("reaped", 2)}
    for key, generation in told.items():
        size = {"before": 40, "run": 300, "other": 20, "reaped": 30}[key[0]] * KIB + key[1]
        assert generation.files == (size, size, 5)
        assert generation.complete
        assert generation.reaped == (key == ("reaped", 1))
        assert (generation.deleted is None) == (key in kept)
        assert found.start <= (generation.deleted or found.end) <= found.end
        assert (generation.born < found.start) == (key[0] == "before")
    assert told["run", 9].retire is not None, "learned from the deletions before"
    arguments = ["--policy", "plan", "--policy", "retainz", "--load", "0.5"]
    arguments += ["--zone-size", "256K", "--json"]
    assert run("run", file, *arguments) == 0
    plan, retainz = json.loads(capsys.readouterr().out)
    assert plan["seeds"][0]["saves_done"] == retainz["seeds"][0]["saves_done"] == 16
    assert run("run", file, *arguments, "--device", "mem:") == 0
    said = capsys.readouterr()
    assert [cell["seeds"][0]["saves_done"] for cell in json.loads(said.out)] == [16, 16]
    assert "16 of 16 saves" in said.err


@pytest.mark.fuse
def test_the_recorder_stops_at_its_time(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(room, "run", 2, range(1, 4), 20 * KIB)
    out = tmp_path / "trace.jsonl"
    assert run("record", room, "--out", out, "--seconds", "0") == 0
    assert "2 generations recorded" in capsys.readouterr().err
    head, *rows, end = map(json.loads, out.read_text().splitlines())
    assert head["retainzfs_trace"] == 1
    assert [row["number"] for row in rows] == [2, 3]
    assert end["generations"] == 2


@pytest.mark.fuse
def test_control_c_ends_a_recording_in_good_order(room: Path) -> None:
    record = [*COMMAND, "replay", "record", str(room)]
    with subprocess.Popen(record, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as recording:
        assert recording.stderr is not None
        try:
            assert b"until Ctrl-C" in recording.stderr.readline()
            train(room, "run", 2, range(1, 4), 20 * KIB)
        finally:
            recording.send_signal(signal.SIGINT)
        out, _ = recording.communicate(timeout=COMMAND_S)
    assert recording.returncode == 0
    assert [g.number for g in trace.parse(out.splitlines(), "t").generations] == [1, 2, 3]


@pytest.mark.fuse
def test_a_new_mount_is_not_taken_for_the_old_one(fresh: Live, tmp_path: Path) -> None:
    fresh.mount()
    with (tmp_path / "trace.jsonl").open("w") as out:
        recorder = Recorder(str(fresh.path), out)
        fresh.umount()
        fresh.mount()
        with pytest.raises(MountError, match="mounted anew"):
            recorder.poll()


@pytest.mark.pure
def test_a_trace_is_simulated_by_every_policy(recorded: Path) -> None:
    workload = trace.workload(trace.parse(recorded.read_bytes().splitlines(), "t"), load=0.8)
    for name in placement.policies():
        result = Simulator(workload, placement.policy(name), RULES["common"]()).run()
        assert result.saves_done == result.saves == 40
