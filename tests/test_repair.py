"""`fsck --repair` on images: says what it does, keeps a copy, loses nothing, and ends sound."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from retainzfs import backup, cli, errors, fsck, journal, layout, mkfs, recovery, repair
from retainzfs.device import Device, open_target
from retainzfs.device.head import decode_header
from retainzfs.layout import BLOCK, BatchKind
from retainzfs.volume import ROOT, Volume
from tests.conftest import Live
from tests.helpers import content, options, put

pytestmark = pytest.mark.volume

DATA = os.urandom(100_000)


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target with /f and /d/g; the test runs in a directory of its own."""
    path = tmp_path / "image"
    mkfs.make(str(path), size=32 << 20)

    async def fill(volume: Volume) -> None:
        await put(volume, ROOT, b"f", DATA)
        directory = await volume.make(ROOT, b"d", 0o040755, 0, 0)
        await put(volume, directory.ino, b"g", b"small")

    in_volume(path, fill)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return path


def in_volume(image: Path, act: Callable[[Volume], Any]) -> None:
    async def run() -> None:
        device = open_target(str(image))
        await device.start()
        try:
            async with Volume.mounted(device, options()) as volume:
                await act(volume)
        finally:
            await device.aclose()

    trio.run(run)


def with_device(image: Path, act: Callable[[Device], Any]) -> None:
    async def run() -> None:
        device = open_target(str(image))
        await device.start()
        try:
            await act(device)
        finally:
            await device.aclose()

    trio.run(run)


def append(image: Path, records: Sequence[layout.Record]) -> None:
    """Let the log say something that no mount would."""

    async def act(device: Device) -> None:
        log = (await recovery.load(device)).journal
        await log.append(BatchKind.LOG, layout.encode_all(records), 1.0)
        await log.append(BatchKind.CLEAN, b"", 1.0)
        await log.flush()

    with_device(image, act)


def fsck_said(
    capsys: pytest.CaptureFixture[str], image: Path, *arguments: str
) -> tuple[int, str, str]:
    code = cli.main(["fsck", str(image), *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def archives() -> list[str]:
    return [name for name in os.listdir() if name.endswith(".tar")]


async def check_files(volume: Volume) -> None:
    assert await content(volume, volume.lookup(ROOT, b"f").ino) == DATA
    assert await content(volume, volume.lookup(volume.lookup(ROOT, b"d").ino, b"g").ino) == b"small"


def test_contradictions_are_announced_then_mended(
    image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = layout.InodeRecord(70, 0o100600, 1, 2, 1, 0, 1, 1, 1, 0, ROOT)
    append(
        image,
        [
            layout.LinkRecord(ROOT, b"nothing", 60),
            file,
            layout.ContentRecord(70, b"found again"),
            layout.SizeRecord(70, 11),
        ],
    )
    with pytest.raises(errors.Damaged, match="leads to no inode"):
        in_volume(image, check_files)
    before = image.read_bytes()
    code, out, err = fsck_said(capsys, image)
    assert code == 3
    assert "name 'nothing' leads to no inode; --repair would remove the name" in out
    assert "inode 70: nothing leads to it; --repair would name it /lost+found/#70" in out
    assert "2 damages found" in err
    assert image.read_bytes() == before, "a check changes nothing"
    code, out, err = fsck_said(capsys, image, "--repair")
    assert code == 0
    assert out.count("--repair would") == 2, "what it will do is said once, and is done then"
    assert err.splitlines()[-1].endswith("no damage")
    (name,) = archives()
    assert name in err

    async def look(volume: Volume) -> None:
        await check_files(volume)
        lost = volume.lookup(ROOT, b"lost+found")
        assert (lost.mode, lost.nlink) == (0o040700, 2)
        assert await content(volume, volume.lookup(lost.ino, b"#70").ino) == b"found again"
        await put(volume, ROOT, b"new", DATA)

    in_volume(image, look)
    assert fsck.check(str(image), scrub=True).findings == []
    with tarfile.open(name) as tar:
        members = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        kept = {name: file.read() for name, file in members.items() if file is not None}
    header = decode_header(before[:BLOCK])
    assert kept["head"] == before[: header.base]
    assert json.loads(kept["report.json"])["damaged"]
    zone = kept["zone-0"]
    assert zone == before[header.base : header.base + len(zone)]
    assert len(zone) > 5 * BLOCK


def test_an_unclean_log_is_ended(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def unclean(device: Device) -> None:
        log = (await recovery.load(device)).journal
        await log.append(BatchKind.LOG, layout.encode(layout.ZoneRecord(20, 1)), 1.0)
        await log.flush()

    with_device(image, unclean)
    code, out, _ = fsck_said(capsys, image)
    assert code == 0
    assert "note: not unmounted cleanly" in out
    code, out, _ = fsck_said(capsys, image, "--repair", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["findings"] == []
    assert os.path.exists(told["backup"])
    in_volume(image, check_files)


def test_a_damaged_snapshot_is_written_anew(
    image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = image.read_bytes()

    async def places(device: Device) -> None:
        replay, chain, _ = await journal.scan(device)
        batch = replay.snapshot[0]
        zone = chain[replay.snapshot_position]
        header = decode_header(before[:BLOCK])
        blocks = -(-(len(batch.payload) + layout.BATCH_HEADER) // BLOCK)
        start = header.base + zone * header.geometry.zone_size + batch.end - blocks * BLOCK
        offsets.append(start + 100)

    offsets: list[int] = []
    with_device(image, places)
    flip(image, offsets[0])
    code, out, _ = fsck_said(capsys, image)
    assert code == 3
    assert "the newest snapshot is broken" in out
    assert "--repair would write a new one" in out
    assert fsck_said(capsys, image, "--repair")[0] == 0
    assert fsck.check(str(image)).findings == []
    in_volume(image, check_files)


@pytest.mark.parametrize("copy", [0, 1])
def test_a_damaged_copy_of_the_header(
    image: Path, copy: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = image.read_bytes()[: 2 * BLOCK]
    flip(image, copy * BLOCK + 30)
    code, out, _ = fsck_said(capsys, image)
    assert code == 3
    assert f"copy {copy} of the device's header is damaged; --repair would write" in out
    assert fsck_said(capsys, image, "--repair")[0] == 0
    assert image.read_bytes()[: 2 * BLOCK] == before
    in_volume(image, check_files)


def test_a_damaged_copy_of_a_state_page(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = decode_header(image.read_bytes()[:BLOCK])
    copies = [header.page_offset(0, copy) for copy in (0, 1)]
    sequences = [int.from_bytes(image.read_bytes()[at : at + 8], "little") for at in copies]
    older = copies[sequences.index(min(sequences))]
    flip(image, older + 50)
    code, out, _ = fsck_said(capsys, image)
    assert code == 0, "a power cut may leave the older copy so"
    assert "of the state of zones 0 to" in out
    assert fsck_said(capsys, image, "--repair")[0] == 0
    assert fsck.check(str(image)).findings == []
    in_volume(image, check_files)


def test_lost_bytes_and_a_damaged_log_are_left_alone(
    image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(image, image.read_bytes().index(DATA[50_000:50_100]))
    code, out, _ = fsck_said(capsys, image, "--scrub", "--repair")
    assert code == 3
    assert "/f: bytes 49152 to 53248 cannot be read" in out
    assert "--repair leaves it alone" in out
    assert archives() == [], "there was nothing to do"
    append(image, [layout.LinkRecord(ROOT, b"nothing", 60)])
    code, out, _ = fsck_said(capsys, image, "--scrub", "--repair")
    assert code == 3, "some of it remains"
    assert fsck.check(str(image)).findings == []
    log_is_lost(image)
    before = image.read_bytes()
    code, out, _ = fsck_said(capsys, image, "--repair")
    assert code == 3
    assert "is broken, was durable; --repair leaves it alone" in out
    assert image.read_bytes() == before


def log_is_lost(image: Path) -> None:
    before = image.read_bytes()

    async def act(device: Device) -> None:
        log = (await recovery.load(device)).journal
        for _ in range(3):
            await log.append(BatchKind.LOG, layout.encode(layout.ZoneRecord(20, 1)), 1.0)
            await log.flush()
        zone, at = log.chain[log.position], log.write_pointer - 2 * BLOCK
        header = decode_header(before[:BLOCK])
        flip(image, header.base + zone * header.geometry.zone_size + at + 20)

    with_device(image, act)


def test_nothing_is_changed_without_a_copy(
    image: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    append(image, [layout.LinkRecord(ROOT, b"nothing", 60)])
    before = image.read_bytes()
    Path("mine.tar").write_bytes(b"precious")
    code, _, err = fsck_said(capsys, image, "--repair", "--backup", "mine.tar")
    assert code == 1
    assert "mine.tar: File exists" in err
    assert Path("mine.tar").read_bytes() == b"precious"
    code, _, err = fsck_said(capsys, image, "--repair", "--backup", "missing/mine.tar")
    assert code == 1
    assert "No such file" in err
    monkeypatch.setattr(backup, "TAR_ROOM", 1 << 60)
    code, _, err = fsck_said(capsys, image, "--repair")
    assert code == 1
    assert "nothing was changed" in err
    assert image.read_bytes() == before
    assert os.listdir() == ["mine.tar"]


def test_a_memory_target_needs_none() -> None:
    with pytest.raises(errors.UsageError):
        repair.repair("mem:64M", fsck.Report("mem:64M"))


@pytest.mark.fuse
def test_a_mounted_target_is_refused(fresh: Live, capsys: pytest.CaptureFixture[str]) -> None:
    fresh.mount()
    code, out, err = fsck_said(capsys, fresh.image, "--repair")
    assert (code, out) == (1, "")
    assert "in use" in err
