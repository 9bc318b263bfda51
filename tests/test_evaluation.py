"""Workloads, their replay in simulated time, and `retainzfs replay`."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retainzfs import cli, placement
from retainzfs.errors import UsageError
from retainzfs.evaluation import pictures, published, tables
from retainzfs.evaluation.experiment import FIGURES, Cell, Setting, replay, simulator
from retainzfs.evaluation.measures import Result
from retainzfs.evaluation.occupancy import Strip, strip
from retainzfs.evaluation.simulator import Simulator
from retainzfs.evaluation.workload import BLOCK, FAMILIES, Delete, Save, Workload
from retainzfs.placement.collection import RANKS

pytestmark = pytest.mark.pure

SHORT = 60  # saves; enough for every stream to delete
LOADS = {"small": 0.7, "large": 0.9}
RUNS = [
    Setting("plan"),
    Setting("plan", load=0.94),
    Setting("retainz", load=0.92, admission="common"),
    Setting("zenfs", load=0.92, parameters=(("finish_threshold", 20.0),)),
    Setting("isolate", load=0.9),
    Setting("plan", "milestones", 0.8),
    Setting("plan", "late-random", 0.76),  # above it space runs out
    Setting("equal-epoch", load=0.9, to_tails=False),
]


def made(family: str, seed: int, load: float = 0.0) -> Workload:
    short = replace(FAMILIES[family], saves=SHORT)
    return short.make(seed, load or LOADS.get(family, 0.8))


def saves(workload: Workload) -> dict[int, Save]:
    return {event.generation: event for event in workload.events if isinstance(event, Save)}


families = st.sampled_from(list(FAMILIES))
seeds = st.integers(0, 10_000)


# Workloads


@settings(deadline=None, max_examples=60)
@given(family=families, seed=seeds)
def test_what_is_deleted_was_saved_and_is_due(family: str, seed: int) -> None:
    workload = made(family, seed)
    events = [event.time for event in workload.events]
    assert events == sorted(events)
    assert workload.saves == len(saves(workload)) == SHORT
    deleted = Counter(e.generation for e in workload.events if isinstance(e, Delete))
    assert set(deleted.values()) == {1}
    regular = FAMILIES[family].cadence_jitter == 0 and not FAMILIES[family].poisson
    for event in workload.events:
        if isinstance(event, Delete):
            save = saves(workload)[event.generation]
            assert math.isfinite(save.hint), "an anchor was deleted"
            assert event.time > save.time
            if regular and not FAMILIES[family].grid:
                assert event.time >= save.hint - 1e-9, "deleted before its hint"


@settings(deadline=None, max_examples=60)
@given(family=families, seed=seeds)
def test_a_stream_keeps_its_last_k(family: str, seed: int) -> None:
    """Whatever is deleted has K successors; with deletions in time nobody has more than K."""
    workload = made(family, seed)
    late = FAMILIES[family].late or FAMILIES[family].late_most
    alive: dict[int, list[int]] = {index: [] for index in range(len(workload.streams))}
    for event in workload.events:
        if isinstance(event, Save):
            alive[event.stream].append(event.generation)
            continue
        stream = saves(workload)[event.generation].stream
        younger = [g for g in alive[stream] if g > event.generation]
        keep = workload.streams[stream].keep
        assert len(younger) >= keep if late else len(younger) == keep
        alive[stream].remove(event.generation)


@settings(deadline=None, max_examples=60)
@given(family=families, seed=seeds)
def test_sizes_are_padded_and_as_announced(family: str, seed: int) -> None:
    workload = made(family, seed)
    jitter = FAMILIES[family].size_jitter
    for save in saves(workload).values():
        assert save.size % BLOCK == 0
        assert 0 <= save.size - sum(save.shards) < BLOCK * len(save.shards)
        mean = workload.streams[save.stream].size
        assert abs(sum(save.shards) - mean) <= jitter * mean + len(save.shards)
    assert all(size % BLOCK == 0 and size > 0 for size in workload.anchors)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, load=st.sampled_from((0.7, 0.84, 0.95)))
def test_the_load_is_met_at_the_peak(seed: int, load: float) -> None:
    workload = FAMILIES["paper"].make(seed, load)
    live = most = sum(workload.anchors)
    saved = saves(workload)
    for number, event in enumerate(workload.events):
        size = saved[event.generation].size
        live += size if isinstance(event, Save) else -size
        after = workload.events[number + 1 : number + 2]
        if not (after and isinstance(after[0], Delete) and after[0].time == event.time):
            most = max(most, live)  # after the deletion that a save triggers
    capacity = workload.zones * workload.capacity
    assert most / capacity == pytest.approx(load, abs=0.01)


@given(family=families, seed=seeds)
@settings(deadline=None, max_examples=20)
def test_a_seed_is_a_workload(family: str, seed: int) -> None:
    assert made(family, seed) == made(family, seed)
    # Of a model's jobs, all that a seed says is the order.
    drawn = [made(family, seed + n).events for n in range(2)]
    assert FAMILIES[family].model or drawn[0] != drawn[1]


@given(seed=seeds)
@settings(deadline=None, max_examples=20)
def test_a_grid_only_rounds_hints_up(seed: int) -> None:
    exact, coarse = made("paper", seed), made("grid16", seed)
    for save, rounded in zip(saves(exact).values(), saves(coarse).values(), strict=True):
        assert rounded == save._replace(hint=math.ceil(save.hint / 16) * 16)
    assert [e for e in exact.events if isinstance(e, Delete)] == [
        e for e in coarse.events if isinstance(e, Delete)
    ]


# Replays


@pytest.mark.parametrize("setting", RUNS, ids=lambda s: f"{s.label} {s.family} {s.load}")
def test_every_byte_is_accounted_for(setting: Setting) -> None:
    """At each moment: what was saved and not deleted lives in the zones, and nothing else."""
    sizes: dict[int, int] = {}

    def look(replayed: Simulator, _until: float) -> None:
        table = replayed.table
        assert sum(table.totals) == replayed.workload.zones * replayed.capacity
        for generation, zones in replayed.where.items():
            assert sum(zones.values()) == sizes.setdefault(generation, sum(zones.values()))
            for index, nbytes in zones.items():
                assert table[index].live[generation] == nbytes
        assert table.totals.live == sum(sizes[generation] for generation in replayed.where)
        assert table.active_data() <= replayed.workload.active

    replayed = simulator(setting, 1, look)
    result = replayed.run()
    told = saves(replayed.workload)
    assert all(sizes[g] == told[g].size for g in sizes if g in told)
    assert result.saves_done == result.saves
    logical = sum(sum(save.shards) for save in told.values())
    host = sum(save.size + BLOCK for save in told.values()) + result.copied_bytes
    assert result.write_amplification == pytest.approx(host / logical)


@pytest.mark.parametrize("setting", RUNS[:4], ids=lambda s: f"{s.label} {s.load}")
def test_overhead_is_occupied_zone_time_less_live_byte_time(setting: Setting) -> None:
    """Counted anew from what the zones held: the identity that placement rests on."""
    kept = strip(setting, 2)
    result = replay(setting, 2)
    warm_up = simulator(setting, 2).workload.warm_up
    occupied = live = 0.0
    for begin, end, zones in zip(kept.begins, kept.ends, kept.zones, strict=True):
        span = max(0.0, end - max(begin, warm_up))
        occupied += span * len(zones)
        live += span * sum(n for held in zones.values() for _, n in held.live) / kept.capacity
    duration = kept.ends[-1] - warm_up
    assert result.overhead_zones == pytest.approx((occupied - live) / duration)
    assert result.overhead_zones == pytest.approx(result.invalid_zones + result.tail_zones)


def test_replays_repeat() -> None:
    first, second = (asdict(replay(Setting("plan", load=0.94), 5)) for _ in range(2))
    assert first.pop("decision_us") > 0
    assert second.pop("decision_us") > 0
    assert first == second


def test_coarse_hints_and_pressure_cost() -> None:
    def mean(setting: Setting, figure: str) -> float:
        results = {seed: replay(setting, seed) for seed in range(3)}
        return Cell(setting, results).mean(figure)

    exact, coarse = (mean(Setting("plan", f), "overhead_zones") for f in ("paper", "grid16"))
    assert coarse > exact
    loads = (Setting("retainz", load=load) for load in (0.84, 0.94))
    calm, pressed = (mean(setting, "write_amplification") for setting in loads)
    assert calm < pressed


def test_zenfs_is_the_best_of_all_its_variants() -> None:
    asked = Setting("zenfs", load=0.9)
    variants = tables.variants(asked)
    assert len(set(variants)) == 16
    fixed = replace(asked, parameters=(("mapping", "medium"),))
    assert {v.label.split()[1] for v in tables.variants(fixed)} == {"mapping=medium"}
    cells = {}
    for number, variant in enumerate(variants):
        result = Result(saves=250, saves_done=200, overhead_zones=5.0 + number)
        cells[variant] = Cell(variant, {0: result})
    assert tables.answers([asked], cells)[asked].setting == variants[0]
    cells[variants[7]].results[0].saves_done = 201
    assert tables.answers([asked], cells)[asked].setting == variants[7]


def test_the_main_table_has_every_published_figure_of_its_family() -> None:
    found = [tables.paper(s) for s in tables.main_table() if tables.paper(s) != published.NOTHING]
    assert len(found) == sum(key[0] == "paper" for key in published.PAPER)


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["replay", "--jobs", "1", *(str(argument) for argument in arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_table_compares(capsys: pytest.CaptureFixture[str]) -> None:
    policies = ("--policy", "retainz", "--policy", "plan")
    code, out, err = run(capsys, *policies, "--seeds", 2, "--load", 0.84)
    assert (code, err) == (0, "")
    heads, first, second = (line.split() for line in out.splitlines())
    assert heads[:4] == ["POLICY", "LOAD", "ADMISSION", "RATIO"]
    assert first[:4] == ["retainz", "0.84", "fixed", "1.00"]
    assert second[:3] == ["plan", "0.84", "priced"]
    assert float(second[3]) < 1


def test_json_has_seeds_and_means(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("--seeds", "3-4", "--set", "span=4", "--policy", "retainz")
    code, out, _ = run(capsys, *arguments, "--json", "--csv", tmp_path / "out.csv")
    assert code == 0
    (cell,) = json.loads(out)
    assert cell["parameters"] == {"span": 4.0}
    assert [one["seed"] for one in cell["seeds"]] == [3, 4]
    for figure in FIGURES:
        values = [one[figure] for one in cell["seeds"]]
        assert cell["mean"][figure] == pytest.approx(sum(values) / 2)
    with (tmp_path / "out.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["seed"] for line in lines] == ["3", "4"]
    assert [float(line["overhead_zones"]) for line in lines] == [
        one["overhead_zones"] for one in cell["seeds"]
    ]


def test_the_same_arguments_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    def once(jobs: int) -> Any:
        assert cli.main(["replay", "--seeds", "3", "--jobs", str(jobs), "--json"]) == 0
        (cell,) = json.loads(capsys.readouterr().out)
        for figures in (cell["mean"], *cell["seeds"]):
            assert figures.pop("decision_us") > 0
        return cell

    assert once(1) == once(2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--family cardboard", "no family 'cardboard'; known: paper, "),
        ("--policy best", "no placement policy 'best'; known: "),
        ("--admission late", "no admission rule 'late'; known: fixed, "),
        ("--rank oldest", f"no rank of victims 'oldest'; known: {', '.join(RANKS)}"),
        ("--load 0.2", "paper: a load of 0.2 is below the "),
        ("--load 1.5", "a load of 1.5 is no share of the device"),
        ("--load nan", "a load of nan is no share of the device"),
        ("--active 2", "2 active zones are too few"),
        ("--zone-size 5000", "zones of 5000 bytes: give a multiple of 4096"),
        ("--set width=3", "--set width=3: no such parameter; plan has "),
        ("--set span --policy retainz", "--set span: give NAME=VALUE"),
        ("--set span=wide --policy retainz", "'wide' is not a number"),
        ("--set size_adaptation=2 --policy retainz", "'2' is not 0 or 1"),
        ("--set span=-1 --policy retainz", "-1 is no quantity"),
        ("--set mapping=none --policy zenfs", "no mapping 'none'; known: not-set, "),
        ("--table --load 0.9", "--load has no meaning with --table"),
        ("--zenfs --policy plan", "--zenfs shows zenfs only"),
        ("--csv {0}/no/out.csv", "there is no directory {0}/no"),
        ("--jobs -1", "--jobs -1: give 1 or more"),
        ("--force", "--force and --saves are for replays on a --device"),
        ("--device mem: --table", "--table is for simulated time; leave out --device"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "out.csv"
    given = arguments.format(tmp_path).split()
    extra = [] if "--csv" in given else ["--csv", str(target)]
    code = cli.main(["replay", *given, *extra])
    told = capsys.readouterr()
    assert (code, told.out) == (2, "")
    assert said.format(tmp_path) in told.err
    assert told.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "written in spite of the error"


def test_every_policy_and_family_can_be_replayed() -> None:
    for name in placement.policies():
        simulator(Setting(name), 0)
    for family in FAMILIES:
        simulator(Setting("plan", family, LOADS.get(family, 0.8)), 0)


# Pictures


def test_pictures_need_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"pip install retainzfs\[evaluation\]"):
        pictures.require()
    code, out, err = run(capsys, "--pictures", tmp_path / "shown")
    assert (code, out) == (2, "")
    assert "matplotlib" in err
    assert not (tmp_path / "shown").exists()


def test_pictures_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: scripts/setup-environment test")
    arguments = ("--policy", "retainz", "--policy", "plan", "--seeds", 1)
    code, _, err = run(capsys, *arguments, "--pictures", tmp_path / "new" / "shown")
    assert (code, err) == (0, "")
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "new" / "shown").iterdir()}
    assert set(drawn) == {"pressure.png", "split.png", "p99.png", "occupancy.png"}
    assert all(data.startswith(b"\x89PNG") for data in drawn.values())


def test_a_strip_is_what_the_zones_held() -> None:
    kept: Strip = strip(Setting("plan"), 0)
    assert kept.begins[1:] == kept.ends[:-1], "time has no holes"
    for zones in kept.zones:
        for held in zones.values():
            filled = sum(nbytes for _, nbytes in held.live) + held.dead + held.tail
            assert filled == kept.capacity
    assert kept.at(-1.0) == kept.at(kept.ends[-1]) == {}
