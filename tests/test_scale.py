"""The run of `scripts/scale`, much smaller; and that saves look at as many zones on any device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from capacity_run import Saver, Source
from scale_run import KEEP, SHAPES, Month, Result, main, parse, runs_of

from retainzfs.device import Geometry, ZoneReport
from retainzfs.device.memory import MemoryDevice
from retainzfs.volume import ROOT, Volume
from retainzfs.zone import Zone
from tests.helpers import DIRECTORY, formatted, noise, put
from tests.simulation import deterministic, options

pytestmark = pytest.mark.volume

ARGUMENTS = ["--shrink", "64", "--days", "6"]


@pytest.fixture(scope="module", params=SHAPES)
def result(request: pytest.FixtureRequest) -> Result:
    name = request.param
    return deterministic(1, Month(name, SHAPES[name].shrunk(64), parse(ARGUMENTS)).run)


def test_runs_fill_a_zone() -> None:
    runs = runs_of(96 << 20)
    assert runs[:2] == [(0, 1016), (1017, 1016)]
    start, length = runs[-1]
    assert start + length + 1 == (96 << 20) // 4096


def test_all_saves_are_done_and_all_that_is_kept_is_read(result: Result) -> None:
    saves = 6 * 24 / result.every_h * len(KEEP)
    assert result.saves == saves
    assert result.lost > 0, "a save was cut short"
    assert result.verified > 0
    assert result.runs > result.zones * 0.5, "nearly all zones are filled"
    assert 1 < result.write_amplification < 1.1
    assert set(result.mounts) == {"empty", "filled", "after the month", "after a power cut"}


def test_a_byte_that_differs_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = Saver.save

    async def wrong(self: Saver, number: int, source: Source) -> None:
        await save(self, number, source)
        name, size, key = self.files[number][0]
        self.files[number][0] = (name, size, key + 1)

    monkeypatch.setattr(Saver, "save", wrong)
    assert main([*ARGUMENTS, "--device", "2TB"]) == 1
    assert "shard0.pt: the bytes from 0 on differ" in capsys.readouterr().err


def test_the_command_prints_a_table_and_writes_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scale.json"
    assert main([*ARGUMENTS, "--days", "2", "--device", "2TB", "--json", str(path)]) == 0
    assert "| mount after a power cut |" in capsys.readouterr().out
    (told,) = json.loads(path.read_text())
    assert told["saves"] == 2 * len(KEEP)


class Watched(list[Zone]):
    """The zones of a table; counts those that are looked at."""

    looked = 0

    def __getitem__(self, index: int) -> Zone:  # type: ignore[override]
        self.looked += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Zone]:
        self.looked += len(self)
        return super().__iter__()


class WatchedDevice(MemoryDevice):
    """Counts the zones of which it is asked."""

    asked = 0

    def known(self, zone: int) -> ZoneReport:
        self.asked += 1
        return super().known(zone)

    def report(self, zones: range | None = None) -> list[ZoneReport]:
        self.asked += self.geometry.zone_count if zones is None else len(zones)
        return super().report(zones)


def looked_at(zones: int) -> tuple[int, int]:
    """Return at how many zones of the table, and of the device, saves, commits, deletions, idle
    looks for what to move, and the status look."""
    size = 256 << 10

    async def run() -> tuple[int, int]:
        device = await formatted(WatchedDevice(Geometry(size, size, zones, 8, 14)))
        async with Volume.mounted(device, replace(options(), policy="plan")) as volume:
            top = (await volume.make(ROOT, b"run", DIRECTORY, 0, 0)).ino
            await volume.setxattr(top, b"user.retainz.keep_last", b"2")
            volume.table.zones = watched = Watched(volume.table.zones)
            device.asked = 0
            for step in range(1, 9):
                await put(volume, top, b"step-%d.pt" % step, noise(3 * size // 2, step))
                if step > 2:
                    await volume.unlink(top, b"step-%d.pt" % (step - 2))
                await volume.syncfs()
                await trio.sleep(60)  # of simulated time, in which nobody writes
                await volume.compaction.compact()
            assert volume.reclaim.resets, "zones came back"
            asked = device.asked
            volume.statistics()
            return watched.looked, asked

    return deterministic(1, run)


def test_a_save_looks_at_as_many_zones_whatever_the_device_has() -> None:
    small, large = looked_at(100), looked_at(3000)
    assert large[0] <= small[0] * 1.1
    assert large[1] <= small[1] * 1.1
