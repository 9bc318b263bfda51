"""A workload through a whole volume: its figures, its bytes, and what it does to a target."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retainzfs import cli, fsck, mkfs, placement, replay_target
from retainzfs.cli.replay_device import of_family, run_on_device
from retainzfs.device import Geometry, open_target
from retainzfs.device.memory import MemoryDevice
from retainzfs.device.pattern import Pattern
from retainzfs.errors import RetainzError, TargetHoldsData, UsageError
from retainzfs.evaluation.experiment import Setting
from retainzfs.evaluation.simulator import Simulator
from retainzfs.evaluation.workload import FAMILIES, Delete, Family, Save, Workload
from retainzfs.placement.admission import RULES
from retainzfs.replay_target import Part, geometry_for, prepared
from retainzfs.volume import ROOT, Options, Volume
from retainzfs.volume_replay import EPOCH_S, Driver, EpochClock, pieces, replay
from tests.device_backends import zoned_target

MEMORY = "mem:"
pytestmark = [pytest.mark.volume]

KIB = 1 << 10
# Bounds against the simulator. Bytes: each of 8 shards has a trailer block and is padded, and the
# log takes some; a generation has a megabyte and more. Zones: the volume places bytes as they come
# and knows the last size of a stream, the simulator the whole generation and its size. Of inputs 0
# to 3 the worst are 0.0072, 0.78, 1.4 % and 0.5 %.
WA_MORE = 0.008
ZONES_OFF = 1.0
RESETS_OFF = 0.02
P99_OFF = 0.01

TINY = Family("tiny", zone_size=256 * KIB, zones=40, saves=16)


def kept(workload: Workload) -> dict[int, Save]:
    deleted = {e.generation for e in workload.events if isinstance(e, Delete)}
    saves = [e for e in workload.events if isinstance(e, Save)]
    return {save.generation: save for save in saves if save.generation not in deleted}


def test_figures_are_near_the_simulators() -> None:
    workload = replace(FAMILIES["paper"], saves=60).make(1, 0.84)
    simulated = Simulator(workload, placement.policy("retainz"), RULES["fixed"]()).run()
    found = replay(MEMORY, workload, Options(policy="retainz")).result
    assert (found.saves, found.saves_done) == (60, 60)
    assert found.copied_bytes == simulated.copied_bytes == 0, "0.84 is no load to copy at"
    more = found.write_amplification - simulated.write_amplification
    assert 0 < more < WA_MORE, f"{more:.4f} above the simulator"
    assert found.overhead_zones == pytest.approx(simulated.overhead_zones, abs=ZONES_OFF)
    assert found.overhead_zones == pytest.approx(found.invalid_zones + found.tail_zones)
    assert found.resets == pytest.approx(simulated.resets, rel=RESETS_OFF)
    assert found.p99_zones == pytest.approx(simulated.p99_zones, rel=P99_OFF)
    assert found.finishes, "6 active zones do not suffice without"
    assert found.stranded_bytes
    assert found.decision_us > 0
    assert found.p99_ms > 0


@pytest.mark.parametrize("name", ["plan", "zenfs"])
def test_every_kept_byte_is_read_back(name: str) -> None:
    workload = TINY.make(1, 0.90)
    replayed = replay(MEMORY, workload, Options(policy=name))
    assert replayed.result.saves_done == 16
    lengths = [sum(save.shards) for save in kept(workload).values()]
    assert replayed.verified == sum(workload.anchors) + sum(lengths)


def test_wrong_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Volume.read

    async def lying(self: Volume, ino: int, offset: int, size: int) -> memoryview:
        data = bytearray(await read(self, ino, offset, size))
        data[-1] ^= 1
        return memoryview(data)

    monkeypatch.setattr(Volume, "read", lying)
    with pytest.raises(RetainzError, match="does not hold what was written"):
        replay(MEMORY, TINY.make(1, 0.84), Options())


def test_a_save_without_room_ends_the_replay() -> None:
    workload = TINY.make(1, 0.84)
    more = tuple(  # twice what the zones hold, and nothing is deleted
        Save(event.time, event.stream, event.generation, event.shards * 3, event.hint)
        for event in workload.events
        if isinstance(event, Save)
    )
    replayed = replay(MEMORY, replace(workload, events=more), Options())
    done = replayed.result.saves_done
    assert 0 < done < replayed.result.saves
    written = [sum(save.shards) for save in more[:done]]
    assert replayed.verified == sum(workload.anchors) + sum(written)


def test_files_differ_everywhere() -> None:
    pattern = Pattern(1)
    seen: dict[bytes, tuple[int, int]] = {}
    for file in range(40):
        content = b"".join(bytes(piece) for _, piece in pieces(pattern, file, 300 * KIB + 1))
        assert len(content) == 300 * KIB + 1
        for at in range(0, 300 * KIB, 4096):
            assert seen.setdefault(content[at : at + 64], (file, at)) == (file, at)


async def driven(workload: Workload, policy: str = "plan") -> dict[tuple[int, int], float]:
    """Replay; return (stream, number) → retirement in the workload's epochs, of what is kept."""
    part, clock = prepared(MEMORY, workload), EpochClock()
    await part.device.start()
    await mkfs.format_started(part.device)
    async with Volume.mounted(part.device, clock.keeping(Options(policy=policy))) as volume:
        await Driver(volume, part, workload, clock, lambda: 0.0).run()
        rows = volume.generations(ROOT)
    found = {}
    for row in rows:
        run, step = Path(row["path"]).parts[1:]
        if run != "anchors":
            assert row["state"] == "complete"
            retire = math.inf if row["anchor"] else row["retire_epoch"] / EPOCH_S
            found[int(run.removeprefix("run")), int(step.removeprefix("step-"))] = retire
    return found


@pytest.mark.parametrize("change", [{}, {"grid": 4.0}, {"milestone_every": 5}, {"poisson": True}])
async def test_the_volume_knows_the_hints_of_the_workload(change: dict[str, Any]) -> None:
    workload = replace(TINY, zones=60, **change).make(2, 0.84)
    numbers: dict[int, int] = defaultdict(int)
    hints = {}
    for event in workload.events:
        if isinstance(event, Save):
            numbers[event.stream] += 1
            if event.generation in kept(workload):
                hints[event.stream, numbers[event.stream]] = event.hint
    found = await driven(workload)
    assert found.keys() == hints.keys()
    for key, hint in hints.items():
        assert found[key] == pytest.approx(hint, abs=1e-6)


# Targets


def test_an_image_is_made_and_holds_the_volume(tmp_path: Path) -> None:
    image = str(tmp_path / "image")
    workload = TINY.make(1, 0.84)
    made = replay(image, workload, Options(policy="retainz"))
    assert not fsck.check(image, scrub=True).findings
    device = open_target(image, readonly=True)
    device.close()
    assert device.geometry == geometry_for(256 * KIB, 40, 6)
    with pytest.raises(TargetHoldsData):
        replay(image, workload, Options(policy="retainz"))
    again = replay(image, workload, Options(policy="retainz"), force=True)
    assert again.verified == made.verified


def test_only_the_first_zones_of_a_device_are_used() -> None:
    large = MemoryDevice(Geometry(256 * KIB, 256 * KIB, 100, 8, 14))
    part = Part(large, geometry_for(256 * KIB, 40, 6))
    assert len(part.device.report()) == 44
    assert part.device.geometry.max_active == 9
    assert part.device.name == large.name


def test_a_device_keeps_its_own_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Geometry(512 * KIB, 256 * KIB, 44, 8, 9)
    monkeypatch.setattr(replay_target, "own_zones", lambda _target: own)
    make = of_family("dev")
    with pytest.raises(UsageError, match="dev: its zones hold 262144 bytes; leave out --zone-size"):
        make(Setting("plan", zone_size=512 * KIB), 0)
    for asked in (0, 256 * KIB):
        made = make(Setting("plan", zone_size=asked), 0)
        assert (made.capacity, made.zones, made.active) == (256 * KIB, 40, 6)


def test_a_command_replays_what_it_is_asked(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(os.urandom(8192))
    make = of_family(str(image), saves=4)
    setting = Setting("plan", "paper", 0.84, zone_size=256 * KIB)
    with pytest.raises(TargetHoldsData):
        run_on_device(str(image), [setting], range(2), make, force=False)
    cells = run_on_device(str(image), [setting], range(2), make, force=True)
    assert {seed: r.saves_done for seed, r in cells[setting].results.items()} == {0: 4, 1: 4}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (Setting("plan", parameters=(("patience", 1.0),)), "--set is for simulated"),
        (Setting("plan", rank="age"), "no rank of victims 'age'"),
        (Setting("plan", family="none"), "no family 'none'"),
        (Setting("none"), "no placement policy 'none'"),
    ],
)
def test_what_a_volume_cannot_choose_is_refused(setting: Setting, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_on_device(MEMORY, [setting], [0], of_family(MEMORY, 4), force=False)


def test_zones_that_no_volume_has_are_refused() -> None:
    with pytest.raises(UsageError, match="zones; the least is"):
        replay(MEMORY, replace(TINY.make(1, 0.84), zones=8), Options())


@pytest.mark.zoned
@pytest.mark.timeout(900)
def test_replays_on_zones_of_the_kernel() -> None:
    target = zoned_target()
    make = of_family(target, saves=6)
    cells = run_on_device(target, [Setting("plan")], [1], make, force=True)
    [cell] = cells.values()
    assert cell.results[1].saves_done == 6


def test_the_same_command_replays_through_a_volume(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--device", "mem:", "--saves", 6, "--zone-size", "256K", "--seeds", 1)
    code = cli.main(["replay", *(str(argument) for argument in arguments), "--json"])
    said = capsys.readouterr()
    assert code == 0
    (cell,) = json.loads(said.out)
    assert cell["mean"]["saves_done"] == 6
    assert "6 of 6 saves" in said.err
