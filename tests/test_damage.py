"""Damaged data: told once and exactly, an error of its bytes only, found by a scrub."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from retainzfs import cli, fsck, scrub
from retainzfs.device.faults import FaultDevice
from retainzfs.device.head import decode_header
from retainzfs.errors import FSError, NoSpace, Unreadable
from retainzfs.extents import Damage
from retainzfs.layout import BLOCK
from retainzfs.volume import ROOT, Volume
from tests.conftest import COMMAND, PATIENCE_S, Live, as_user, retainzfs
from tests.helpers import (
    content,
    formatted,
    half_dead,
    mounted,
    put,
    small_device,
    zones_of,
)

SCRUB = b"user.retainz.scrub"


async def one_file(volume: Volume, blocks: int, name: bytes = b"f") -> tuple[int, bytes]:
    data = random.Random(blocks).randbytes(blocks * BLOCK)
    ino = await put(volume, ROOT, name, data)
    await volume.fsync(ino)
    return ino, data


def place(volume: Volume, ino: int, block: int) -> tuple[int, int]:
    """Return the zone and the block in it that hold a block of a file."""
    extent = next(volume.inode(ino).spans(block, block + 1))
    return extent.run.zone, extent.run.start + extent.first


def flip(device: FaultDevice, where: tuple[int, int]) -> None:
    device.damage(where[0], where[1] * BLOCK + 5)


def refuse(device: FaultDevice, where: tuple[int, int]) -> None:
    device.lose(*where)


BREAKS = pytest.mark.parametrize(
    ("break_", "reason", "counter"),
    [
        (flip, "checksum mismatch", "checksum_errors"),
        (refuse, "Input/output error", "read_errors"),
    ],
)
Break = Callable[[FaultDevice, tuple[int, int]], None]


@pytest.mark.volume
@BREAKS
async def test_damage_is_told_once_with_its_place(
    break_: Break, reason: str, counter: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino, data = await one_file(volume, 50)
        zone, block = place(volume, ino, 7)
        break_(device, (zone, block))
        for start, length in ((0, len(data)), (7 * BLOCK, 10), (5 * BLOCK, 4 * BLOCK)):
            with pytest.raises(Unreadable, match=reason) as caught:
                await volume.read(ino, start, length)
            assert caught.value.errno == errno.EIO
        lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert lines == [
            f"/f: bytes {7 * BLOCK} to {8 * BLOCK} cannot be read: {reason};"
            f" extent: file block 7, zone {zone}, zone block {block}"
        ]
        assert volume.statistics()[counter] == 3
        rest = [*range(7), *range(8, 50)]
        for i in rest:
            found = bytes(await volume.read(ino, i * BLOCK, BLOCK))
            assert found == data[i * BLOCK : (i + 1) * BLOCK]


@pytest.mark.volume
async def test_lost_checksums_are_told_for_all_that_they_cover(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino, data = await one_file(volume, 50)
        zone, block = place(volume, ino, 49)
    device.damage(zone, (block + 1) * BLOCK + 40)
    async with mounted(device) as volume:
        with pytest.raises(Unreadable):
            await volume.read(ino, 0, len(data))
    assert f"/f: bytes 0 to {len(data)} cannot be read: its checksums are lost" in caplog.text


@pytest.mark.volume
@BREAKS
async def test_collection_leaves_damage_in_place_and_goes_on(
    break_: Break, reason: str, counter: str
) -> None:
    device = await formatted(small_device(zones=24))
    rng = random.Random(3)
    async with mounted(device) as volume:
        kept = await half_dead(volume, rng, 24)
        await volume.syncfs()
        victim = volume.reclaim._victim()
        assert victim is not None
        bad = next(ino for ino in kept if zones_of(volume, ino) == {victim.index})
        where = place(volume, bad, 2)
        break_(device, where)
        with trio.fail_after(10):
            done = await volume.collect()
            assert done["zones_reset"] > 0, "the other zones were emptied"
            assert await volume.collect() == {"zones_reset": 0, "copied_bytes": 0}, "an end"
            with pytest.raises(NoSpace):
                await put(volume, ROOT, b"full", bytes(64 << 20), piece=1 << 17)
        assert place(volume, bad, 2) == where, "damaged bytes stay where they are"
        for ino, data in kept.items():
            if ino == bad:
                with pytest.raises(Unreadable, match=reason):
                    await content(volume, ino)
            else:
                assert await content(volume, ino) == data
        await volume.unlink(ROOT, b"full")
        await volume.unlink(ROOT, volume.inode(bad).name)
        await volume.syncfs()
        await volume.reclaim.reset_dead()
        assert volume.table[victim.index].write_pointer == 0, "with its files the zone comes back"
        assert volume.failed is None


@pytest.mark.volume
async def test_a_close_over_damaged_bytes_is_durable() -> None:
    """The bytes that tell whether a save is whole are lost; what was written now is not."""
    device = await formatted(small_device())
    async with mounted(device) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        ino, data = await one_file(volume, 20, b"step-1.pt")
        flip(device, place(volume, ino, 0))
        await volume.write(ino, len(data), b"more")
        await volume.flush(ino)
        assert volume.committer.clean(volume.inode(ino))
        (row,) = volume.generations(ROOT)
        assert row["state"] == "incomplete"
        assert "cannot be read" in row["reason"]


# The scrub of a volume


async def scrubbed(volume: Volume, order: bytes = b"start") -> list[Damage]:
    await volume.setxattr(ROOT, SCRUB, order)
    with trio.fail_after(10):
        await volume.scrub.latest.ended.wait()
    return volume.scrub.latest.found


@pytest.mark.volume
@BREAKS
async def test_a_scrub_finds_what_is_damaged_and_nothing_else(
    break_: Break, reason: str, counter: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        large, _ = await one_file(volume, 60, b"large")
        small, _ = await one_file(volume, 3, b"small")
        await volume.write(small, 3 * BLOCK, b"staged, and not yet on the device")
        assert await scrubbed(volume) == []
        told = volume.statistics()["scrub"]
        assert told == {"state": "done", "done": 63 * BLOCK, "total": 63 * BLOCK, "damaged": 0}
        for block in (10, 11, 40):
            break_(device, place(volume, large, block))
        found = await scrubbed(volume)
        assert [(d.path, d.start, d.end) for d in found] == [
            ("/large", 10 * BLOCK, 12 * BLOCK),
            ("/large", 40 * BLOCK, 41 * BLOCK),
        ]
        assert {d.reason for d in found} == {reason}
        assert volume.statistics()["scrub"]["damaged"] == 2
        assert [r.getMessage() for r in caplog.records if "cannot be read" in r.message] == [
            str(d) for d in found
        ]
        # Overwritten blocks are nobody's any more, and their damage is none.
        await volume.write(large, 10 * BLOCK, bytes(2 * BLOCK))
        await volume.fsync(large)
        assert [d.start for d in await scrubbed(volume)] == [40 * BLOCK]


@pytest.mark.volume
async def test_a_scrub_beside_changes_accuses_nobody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    device = await formatted(small_device(zones=32))
    rng = random.Random(11)
    async with mounted(device) as volume:
        files = {b"f%d" % i: rng.randbytes(rng.choice((9000, 150_000))) for i in range(16)}
        for name, data in files.items():
            await put(volume, ROOT, name, data)
        await volume.syncfs()
        await volume.setxattr(ROOT, SCRUB, b"100K")
        while volume.scrub.latest.state == "running":
            name = rng.choice(list(files))
            match rng.randrange(4):
                case 0:
                    await volume.unlink(ROOT, name)
                    files[name] = rng.randbytes(rng.choice((9000, 150_000)))
                    await put(volume, ROOT, name, files[name])
                case 1:
                    await volume.rename(ROOT, name, ROOT, b"r" + name)
                    files[b"r" + name] = files.pop(name)
                case 2:
                    ino = volume.lookup(ROOT, name).ino
                    await volume.write(ino, 4096, b"changed" * 800)
                    files[name] = files[name][:4096] + b"changed" * 800 + files[name][9696:]
                case 3:
                    await volume.collect()
            await volume.syncfs()
            await trio.sleep(0.3)
        assert volume.scrub.latest.state == "done"
        assert volume.scrub.latest.found == []
        assert not any(zone.pins for zone in volume.table.zones)
        for name, data in files.items():
            assert await content(volume, volume.lookup(ROOT, name).ino) == data


@pytest.mark.volume
async def test_a_scrub_keeps_its_rate(autojump_clock: trio.testing.MockClock) -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        await one_file(volume, 500)
        start = trio.current_time()
        await volume.setxattr(ROOT, SCRUB, b"100K")
        await volume.scrub.latest.ended.wait()
        assert trio.current_time() - start == pytest.approx(500 * BLOCK / (100 << 10))


@pytest.mark.volume
async def test_one_scrub_at_a_time_until_it_is_stopped() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        await one_file(volume, 50)
        await volume.setxattr(ROOT, SCRUB, b"1")
        with pytest.raises(FSError, match="running already") as caught:
            await volume.setxattr(ROOT, SCRUB, b"start")
        assert caught.value.errno == errno.EBUSY
        await volume.setxattr(ROOT, SCRUB, b"stop")
        assert volume.scrub.latest.state == "stopped"
        assert await scrubbed(volume) == []
        assert volume.scrub.latest.state == "done"
        await volume.setxattr(ROOT, SCRUB, b"1")
    assert volume.scrub.latest.state == "stopped", "an unmount does not wait for a scrub"


# On a real mount


def image_offset(image: Path, path: Path, block: int) -> int:
    """Return where the image holds a block of a file, by the extents that the file tells."""
    extents: list[list[int]] = json.loads(os.getxattr(path, "user.retainz.extents"))
    first, _, zone, start = next(e for e in extents if e[0] <= block < e[0] + e[1])
    with image.open("rb") as file:
        header = decode_header(file.read(BLOCK))
    return header.base + zone * header.geometry.zone_size + (start + block - first) * BLOCK


def flip_bit(image: Path, offset: int) -> None:
    with image.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def forget_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def hurt(fresh: Live) -> tuple[Live, bytes]:
    """A mount with three files, of which `f` has a flipped bit in block 300."""
    data = random.Random(1).randbytes(3 << 20)
    fresh.expected = ["cannot be read"]
    fresh.mount()
    for name in ("f", "other"):
        (fresh.path / name).write_bytes(data)
        with (fresh.path / name).open("rb") as file:
            os.fsync(file.fileno())
    flip_bit(fresh.image, image_offset(fresh.image, fresh.path / "f", 300))
    forget_pages(fresh.path / "f")
    return fresh, data


def complaints(live: Live) -> list[str]:
    return [line for line in live.log.read_text().splitlines() if " ERROR " in line]


@pytest.mark.fuse
def test_a_flipped_bit_below_a_mount(hurt: tuple[Live, bytes]) -> None:
    live, data = hurt
    path = live.path / "f"
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            path.read_bytes()
    with path.open("rb") as file:
        start = file.read(300 * BLOCK)
        file.seek(301 * BLOCK)
        assert start + data[300 * BLOCK : 301 * BLOCK] + file.read() == data
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[301 * BLOCK :] == data[301 * BLOCK :]
    assert (live.path / "other").read_bytes() == data
    (live.path / "new").write_bytes(data)
    (line,) = complaints(live)
    assert f"/f: bytes {300 * BLOCK} to {301 * BLOCK} cannot be read: checksum mismatch" in line
    assert "extent: file block 300, zone " in line
    status = json.loads(retainzfs("status", live.path, "--json").stdout)
    assert status["checksum_errors"] >= 2
    assert status["read_errors"] == 0
    assert "DAMAGED" in retainzfs("status", live.path).stdout


@pytest.mark.fuse
def test_the_scrub_command(hurt: tuple[Live, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    live, _ = hurt
    assert cli.main(["scrub", str(live.path)]) == 3
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    assert line.startswith(f"/f: bytes {300 * BLOCK} to {301 * BLOCK} cannot be read")
    assert "1 damages found" in said.err
    assert cli.main(["scrub", str(live.path), "--json"]) == 3
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["state"] == "done"
    assert report["done"] == report["total"] >= 6 << 20
    assert [finding["path"] for finding in report["findings"]] == ["/f"]
    (live.path / "f").unlink()
    assert cli.main(["scrub", str(live.path)]) == 0
    assert "no damage" in capsys.readouterr().err
    live.umount()
    assert fsck.check(str(live.image), scrub=True).findings == []


@pytest.mark.fuse
def test_an_interrupted_scrub_stops_and_lets_the_next_begin(
    fresh: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh.mount("allow_other" if os.geteuid() == 0 else "")
    for number in range(4):
        (fresh.path / f"f{number}").write_bytes(bytes(1 << 20))
        with (fresh.path / f"f{number}").open("rb") as file:
            os.fsync(file.fileno())
    command = [*COMMAND, "scrub", str(fresh.path), "--rate", "1K"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as slow:
        _until(lambda: bool(_scrub_of(fresh)["state"] == "running"))
        assert cli.main(["scrub", str(fresh.path)]) == 1
        assert "a scrub is running already" in capsys.readouterr().err
        assert cli.main(["status", str(fresh.path)]) == 0
        assert "running, " in capsys.readouterr().out
        slow.send_signal(signal.SIGINT)
        assert slow.wait(PATIENCE_S) == cli.INTERRUPTED
    assert _scrub_of(fresh)["state"] == "stopped"
    assert cli.main(["scrub", str(fresh.path)]) == 0
    fresh.path.chmod(0o777)
    told = as_user(65534, f"import os; os.setxattr({str(fresh.path)!r}, {SCRUB!r}, b'start')")
    assert "Operation not permitted" in told.stderr


def _scrub_of(live: Live) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((live.path / ".retainz/stats.json").read_bytes())["scrub"]
    return told


def _until(true: Callable[[], bool]) -> None:
    """The mount tells only when asked."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it did not happen"


@pytest.mark.volume
async def test_a_pace_keeps_its_rate(autojump_clock: trio.testing.MockClock) -> None:
    pace = scrub.Pace(1 << 20)
    start = trio.current_time()
    for _ in range(8):
        await pace.spent(1 << 20)
    assert trio.current_time() - start == pytest.approx(8)
    await scrub.Pace(None).spent(1 << 40)
    assert trio.current_time() - start == pytest.approx(8)
