"""The whole filesystem on a zoned block device of the kernel, with every zone held against what
other programs say of the device."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from retainzfs import fsck, mkfs, mounting
from retainzfs.device import Condition, Geometry, open_target
from retainzfs.device.kernel import KernelDevice
from retainzfs.device.protocol import ACTIVE, BLOCK
from tests import zonereport
from tests.conftest import COMMAND_S, PATIENCE_S, Live, looked_after
from tests.device_backends import random_blocks, zoned_target
from tests.jobs import Jobs, crash, go_on, serving

pytestmark = [pytest.mark.zoned, pytest.mark.fuse]

MIB = 1 << 20
STEPS = 12  # of training, behind each other
KEPT = 2  # saves


class Zoned(Live):
    """On the first zoned device, whose zones are compared at every check and unmount.

    Mounts are forked from this process: where such devices are emulated, the import of what a
    daemon needs takes longer than a test.
    """

    def format(self, *_: object) -> None:
        self.image = Path(zoned_target())
        mkfs.make(str(self.image), force=True)

    def mount(self, options: str = "", patch: str = "") -> None:
        assert not patch
        mounting.mount_daemon(
            mounting.Mount(
                str(self.image),
                str(self.path),
                mounting.parse_options([options]),
                log_file=str(self.log),
            )
        )
        self.check()

    def check(self) -> None:
        super().check()
        zonereport.check_mount(self.path)

    def umount(self) -> None:
        super().umount()
        zonereport.check_target(str(self.image))

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.clear()

    def clear(self) -> None:
        """Take the dead mount away, and check what its daemon has left."""
        self.umount()
        report = fsck.check(str(self.image), scrub=True)
        assert not report.damaged, report.findings

    def end(self) -> None:
        """Unmount in good order; nothing at all is to be said of what is left."""
        self.check()
        self.umount()
        assert fsck.check(str(self.image), scrub=True).findings == []

    def geometry(self) -> Geometry:
        device = open_target(str(self.image), readonly=True)
        device.close()
        return device.geometry

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.path / ".retainz/stats.json").read_bytes())
        return told

    def settle(self) -> None:
        """Have everything written, and everything dead reset."""
        os.setxattr(self.path, "user.retainz.gc", b"1")


@pytest.fixture
def zoned() -> Iterator[Zoned]:
    with looked_after(Zoned) as live:
        yield live


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    pytest.importorskip("torch")
    with serving() as server:
        yield server


def run_directory(live: Live, name: str = "run", keep: int = KEPT) -> Path:
    run = live.path / name
    run.mkdir()
    os.setxattr(run, "user.retainz.keep_last", b"%d" % keep)
    os.setxattr(run, "user.retainz.reap", b"1")
    return run


def content(length: int) -> bytes:
    return bytes(random_blocks(-(-length // BLOCK)))[:length]


def states(run: Path) -> dict[int, str]:
    rows = json.loads(os.getxattr(run, "user.retainz.generations"))
    return {row["number"]: row["state"] for row in rows}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """For what happens behind the mount, which tells nobody."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.1)


# --- training ------------------------------------------------------------------------------------


@pytest.mark.torch
def test_training_goes_on_bit_for_bit_after_remounts(zoned: Zoned, jobs: Jobs) -> None:
    for part in range(2):
        zoned.mount()
        assert jobs.run(zoned.path, zoned.base / f"record-{part}", STEPS) == 0
        zoned.settle()
        assert set(states(zoned.path / "run").values()) == {"complete"}
        assert len(states(zoned.path / "run")) == KEPT
        if part:
            assert zoned.status()["zones"]["reset_total"] > 0, "no zone retired"
        zoned.end()
    steps = [
        json.loads(line)[1:]
        for part in range(2)
        for line in (zoned.base / f"record-{part}").read_text().splitlines()
        if line.startswith('["step"')
    ]
    assert steps == jobs.undisturbed[: 2 * STEPS]


@pytest.mark.torch
@pytest.mark.parametrize("setting", ["commit-flushed:70", "reset-after", "switch-written"])
def test_training_outlives_its_daemon(zoned: Zoned, jobs: Jobs, setting: str) -> None:
    crash(zoned, jobs, zoned.base / "record", setting)
    zonereport.check_target(str(zoned.image))
    go_on(zoned, jobs, zoned.base / "record")


# --- death ---------------------------------------------------------------------------------------


def test_what_was_closed_outlives_the_daemon(zoned: Zoned) -> None:
    """Again and again, with another save under way; that one does not count."""
    saved: dict[int, bytes] = {}
    zoned.mount()
    run = run_directory(zoned)
    for step in range(1, 7):
        saved[step] = content(5 * MIB)
        (run / f"step-{step}.msgpack").write_bytes(saved[step])
        if step % 2:
            continue
        with (run / f"step-{step + 100}.msgpack").open("wb", buffering=0) as torn:
            torn.write(content(3 * MIB))
            os.fsync(torn.fileno())
            zoned.signal(signal.SIGKILL)
            with pytest.raises(OSError, match=r"not connected|aborted"):
                torn.write(b"more")
        zoned.clear()
        zoned.mount()
        told = states(run)
        assert told.pop(step + 100) == "incomplete"
        assert told == dict.fromkeys((step - 1, step), "complete")
        for number in told:
            assert (run / f"step-{number}.msgpack").read_bytes() == saved[number]
        (run / f"step-{step + 100}.msgpack").unlink()
    zoned.settle()
    zoned.end()


# --- no room -------------------------------------------------------------------------------------


def test_a_full_device_can_be_emptied_and_filled_again(zoned: Zoned) -> None:
    zoned.mount()
    piece = content(8 * MIB)
    counts = []
    for _ in range(2):
        files: list[Path] = []
        with pytest.raises(OSError, match="No space") as caught:  # noqa: PT012
            while True:
                files.append(zoned.path / f"{len(files)}.bin")
                files[-1].write_bytes(piece)
        assert caught.value.errno == errno.ENOSPC
        files.pop().unlink()
        zoned.settle()
        zoned.check()
        assert files[0].read_bytes() == files[-1].read_bytes() == piece
        counts.append(len(files))
        for file in files:
            file.unlink()
        zoned.settle()
        assert zoned.status()["zones"]["full"] == 0, "zones of deleted files were not reset"
    capacity = zoned.status()["capacity"]
    assert len(piece) * counts[0] > 0.9 * capacity
    assert counts[1] == counts[0]
    zoned.end()


# --- no slots ------------------------------------------------------------------------------------


def hold_all_slots(target: str) -> int:
    """Leave every active zone that the device allows to zones that nobody finishes, as another
    program would: some explicitly open, the others with a block in them. Return how many."""
    device = open_target(target, readonly=True)
    device.close()
    limits = device.geometry
    report = zonereport.blkzone(target)
    used = sum(zone.condition in ACTIVE for zone in report)
    empty = [zone for zone in reversed(report) if zone.condition is Condition.EMPTY]
    taken = empty[: limits.max_active - used]
    fd = os.open(target, os.O_WRONLY | os.O_DIRECT)
    page = mmap.mmap(-1, BLOCK)
    for zone in taken[limits.max_open :]:
        os.pwrite(fd, page, zone.start)
    for zone in taken[: limits.max_open]:
        sector, length = zone.start // 512, zone.length // 512
        subprocess.run(
            ["blkzone", "open", "-o", str(sector), "-l", str(length), target],
            check=True,
            timeout=COMMAND_S,
        )
    os.close(fd)
    active = sum(zone.condition in ACTIVE for zone in zonereport.blkzone(target))
    assert active == limits.max_active
    return len(taken)


def test_saves_work_where_others_have_left_all_slots_taken(zoned: Zoned) -> None:
    assert hold_all_slots(str(zoned.image)) > 8
    zoned.mount()
    run = run_directory(zoned)
    data = content(7 * MIB)
    for step in range(1, 4):
        (run / f"step-{step}.msgpack").write_bytes(data)
    assert states(run) == {2: "complete", 3: "complete"}
    zoned.settle()
    told = zoned.status()
    assert told["write_errors"] == 0
    assert told["device"]["active"] <= zoned.geometry().max_active
    zoned.end()


def test_saves_work_after_a_death_with_many_streams(zoned: Zoned) -> None:
    """More of them than the device has slots, each with bytes in zones that were never finished."""
    zoned.mount()
    classes = (b"checkpoint", b"cache", b"scratch", b"output")
    for number in range(20):
        run = run_directory(zoned, f"run-{number}", keep=1 + number % 5)
        os.setxattr(run, "user.retainz.class", classes[number % len(classes)])
        (run / "step-1.msgpack").write_bytes(content(300_000))
        with (run / "step-2.msgpack").open("wb") as torn:
            torn.write(content(200_000))
            torn.flush()
            os.fsync(torn.fileno())
    zoned.kill()
    zoned.mount()
    for number in range(20):
        data = content(MIB)
        path = zoned.path / f"run-{number}" / "step-3.msgpack"
        path.write_bytes(data)
        assert path.read_bytes() == data
    assert zoned.status()["write_errors"] == 0
    zoned.settle()
    zoned.end()


# --- resets --------------------------------------------------------------------------------------


def test_deleting_a_generation_resets_zones_behind_its_back(
    zoned: Zoned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's resets wait for a file of the test; deleting does not."""
    gate = zoned.base / "gate"
    real = KernelDevice.reset

    async def reset(self: KernelDevice, zones: Any) -> None:
        while not gate.exists():  # noqa: ASYNC110 - another process opens it
            await trio.sleep(0.01)
        await real(self, zones)

    monkeypatch.setattr(KernelDevice, "reset", reset)
    gate.touch()
    zoned.mount()
    step = zoned.path / "run" / "step-1"
    step.mkdir(parents=True)
    for shard in range(3):
        (step / f"__{shard}_0.distcp").write_bytes(content(7 * MIB))
    (step / ".metadata").write_bytes(b"x" * 1000)
    zoned.settle()
    before = zoned.status()["zones"]
    gate.unlink()
    shutil.rmtree(step)
    assert not step.exists()
    held = zoned.status()["zones"]
    assert held["reset_total"] == before["reset_total"]
    gate.touch()
    wanted = before["reset_total"] + 3 * 7 * MIB // before["capacity"] - 1
    wait_until(lambda: zoned.status()["zones"]["reset_total"] >= wanted, "resets")
    zoned.settle()
    zoned.end()


def test_statistics_make_sense(zoned: Zoned) -> None:
    zoned.mount()
    run = run_directory(zoned)
    written = 0
    for step in range(1, 9):
        data = content(4 * MIB + 5000)
        (run / f"step-{step}.msgpack").write_bytes(data)
        written += len(data)
    zoned.settle()
    told = zoned.status()
    zones, geometry = told["zones"], zoned.geometry()
    zone_map = json.loads((zoned.path / ".retainz/zones.json").read_bytes())
    data_zones = sum(zone["class"] != "metadata" for zone in zone_map)
    assert written <= told["logical_bytes"] < 1.01 * written
    assert told["host_bytes"] >= told["logical_bytes"] + told["copied_bytes"]
    assert told["write_amplification"] == told["host_bytes"] / told["logical_bytes"] < 1.3
    assert told["device"]["appended_bytes"] == told["host_bytes"]
    assert told["device"]["resets"] >= zones["reset_total"] > 0
    assert zones["capacity"] == geometry.zone_capacity
    assert told["capacity"] == data_zones * geometry.zone_capacity
    assert zones["empty"] + zones["active"] + zones["full"] == data_zones
    assert 0 < told["device"]["active"] <= geometry.max_active
    assert told["device"]["open"] <= geometry.max_open
    assert told["used"] + told["free"] + told["dead"] <= told["capacity"]
    assert told["failed"] is None
    zoned.end()
