"""Generations that the filesystem deletes by itself, as programs on a mount see it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE_S, Live, retainzfs, wait_until

pytestmark = pytest.mark.fuse

KIB, MIB = 1 << 10, 1 << 20
FILES = 400  # of a large generation; more than are freed in one piece


def keeping(run: Path, keep: int = 1) -> Path:
    run.mkdir(exist_ok=True)
    os.setxattr(run, "user.retainz.keep_last", b"%d" % keep)
    os.setxattr(run, "user.retainz.reap", b"1")
    return run


def save(run: Path, step: int, files: int = 2, size: int = 64 * KIB) -> Path:
    """Save as the Hugging Face trainer does, the marker last."""
    path = run / f"checkpoint-{step}"
    (path / "shards").mkdir(parents=True)
    for number in range(files):
        (path / "shards" / f"{number:03}.bin").write_bytes(os.urandom(size))
    (path / "trainer_state.json").write_text("{}")
    return path


def reaped(path: Path) -> None:
    wait_until(lambda: not path.exists(), f"{path.name} was not reaped")


def rows(run: Path) -> dict[int, dict[str, Any]]:
    told = json.loads(os.getxattr(run, "user.retainz.generations"))
    return {row["number"]: row for row in told}


def test_what_is_added_to_a_complete_generation_takes_nothing_away(room: Path) -> None:
    """A shell closes the file of `>` once before it writes to it, and a log grows."""
    run = keeping(room)
    for step in (1, 2, 3):
        saved = save(run, step)
        (saved / "train.log").write_text("begin")
        shell = "echo {} > eval.json; echo end >> train.log"
        subprocess.run(shell, shell=True, cwd=saved, check=True)
        assert rows(run)[step]["state"] == "complete"
    for step in (1, 2):
        reaped(run / f"checkpoint-{step}")
    (run / "checkpoint-3" / "shards" / "000.bin").write_bytes(b"changed")
    assert rows(run)[3]["state"] == "writing", "what is overwritten is another thing"


def test_a_reader_finds_all_of_a_generation_or_nothing(room: Path) -> None:
    run = keeping(room)
    first = save(run, 1, files=FILES, size=KIB)
    begun = threading.Event()
    torn: list[str] = []

    def read() -> None:
        while first.exists():
            try:
                found = len(os.listdir(first / "shards"))
                whole = found == FILES and (first / "trainer_state.json").exists()
            except FileNotFoundError:
                continue  # asks again whether it is there
            begun.set()
            if not whole and first.exists():
                torn.append(f"{found} files")

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(PATIENCE_S)
    save(run, 2)
    reaped(first)
    reader.join(PATIENCE_S)
    assert not torn
    assert os.listdir(run) == ["checkpoint-2"]
    assert list(rows(run)) == [2]


def test_space_comes_back_though_nobody_asks_for_the_names(room: Path) -> None:
    """The kernel remembers what it looked up for as long as it has memory."""
    run = keeping(room)

    def used() -> int:
        told: int = json.loads((room.parent / ".retainz/stats.json").read_bytes())["used"]
        return told

    two = used() + 2 * 8 * 256 * KIB
    for step in (1, 2):
        save(run, step, files=8, size=256 * KIB)
    wait_until(lambda: os.listdir(run) == ["checkpoint-2"], "the first was not reaped")
    wait_until(lambda: used() < two, "the first was not freed")
    save(run, 3, files=8, size=256 * KIB)
    wait_until(lambda: os.listdir(run) == ["checkpoint-3"], "the second was not reaped")
    wait_until(lambda: used() < two, "the second was not freed")


def test_directories_that_are_open_when_all_ends_are_no_damage(fresh: Live) -> None:
    """Whether a program removed them or we did."""
    fresh.mount()
    run = keeping(fresh.path / "run")
    (fresh.path / "deep" / "below").mkdir(parents=True)
    shutil.copytree(fresh.path / "deep", run / "checkpoint-1" / "deep")
    opened = [
        os.open(path, os.O_RDONLY)
        for path in (fresh.path / "deep/below", run / "checkpoint-1/deep/below")
    ]
    shutil.rmtree(fresh.path / "deep")
    for step in (1, 2):
        (run / f"checkpoint-{step}").mkdir(exist_ok=True)
        (run / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    reaped(run / "checkpoint-1")
    wait_until(lambda: not os.listdir(opened[1]), "what is open was not emptied")
    os.sync()
    fresh.signal(signal.SIGKILL)
    for fd in opened:
        os.close(fd)
    retainzfs("umount", fresh.path)
    told = json.loads(retainzfs("fsck", fresh.image, "--json").stdout)
    assert not any(finding["damage"] for finding in told["findings"]), told
    fresh.mount()
    fresh.umount()
    assert json.loads(retainzfs("fsck", fresh.image, "--json").stdout)["findings"] == []


def test_what_is_open_keeps_its_bytes(room: Path) -> None:
    run = keeping(room)
    first = save(run, 1)
    shard = first / "shards" / "000.bin"
    data = shard.read_bytes()
    with shard.open("rb") as file:
        directory = os.open(first / "shards", os.O_RDONLY)
        save(run, 2)
        reaped(first)
        assert file.read() == data
        wait_until(lambda: not os.listdir(directory), "what is open was not emptied")
        with pytest.raises(FileNotFoundError):
            os.open("late", os.O_CREAT | os.O_WRONLY, dir_fd=directory)
        os.close(directory)
    assert save(run, 1).exists(), "the name is free again"


def test_space_comes_back_and_nothing_is_left_after_a_crash(fresh: Live) -> None:
    fresh.mount()
    run = keeping(fresh.path / "run")
    first = save(run, 1, files=FILES)
    save(run, 2)
    reaped(first)
    root = os.open(fresh.path, os.O_RDONLY)
    os.fsync(root)
    os.close(root)
    fresh.signal(signal.SIGKILL)
    retainzfs("umount", fresh.path)
    fresh.mount()
    assert os.listdir(run) == ["checkpoint-2"]
    assert list(rows(run)) == [2]
    fresh.umount()
    told = json.loads(retainzfs("fsck", fresh.image, "--json").stdout)
    assert told["findings"] == []
    assert told["files"] == 3, "files of the first one are still there"
    fresh.mount()
    stats = json.loads((fresh.path / ".retainz/stats.json").read_bytes())
    assert stats["used"] < FILES * 64 * KIB / 2


def test_a_name_of_ones_own_is_left_alone(fresh: Live) -> None:
    fresh.mount()
    with pytest.raises(PermissionError):
        (fresh.path / ".retainz").rmdir()
    run = keeping(fresh.path / "run")
    (run / ".retainz").mkdir()
    (run / ".retainz" / "mine").write_bytes(b"mine")
    save(run, 1)
    save(run, 2)
    reaped(run / "checkpoint-1")
    assert set(os.listdir(fresh.path)) == {"run"}
    fresh.umount()
    fresh.mount()
    assert (run / ".retainz" / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_protects(room: Path, absolute: bool) -> None:
    run = keeping(room)
    first = save(run, 1)
    (run / "best").symlink_to(first if absolute else first.name)
    (run / "last").symlink_to("last")
    second = save(run, 2)
    save(run, 3)
    reaped(second)
    assert (run / "best" / "trainer_state.json").read_text() == "{}"
    assert rows(run)[1]["state"] == "complete"
    assert "kept: best points to it" in retainzfs("generations", run).stdout
    assert "kept: best points to it" in retainzfs("hint", first).stdout
    (run / "best").unlink()
    save(run, 4)
    reaped(first)
    assert {path.name for path in run.iterdir()} == {"last", "checkpoint-4"}


def test_a_deletion_in_readdir_order_begins_with_the_marker(room: Path) -> None:
    run = keeping(room)
    first = save(run, 1)
    (first / "aaa.bin").write_bytes(b"x")
    assert os.listdir(first)[0] == "trainer_state.json"
    for entry in list(os.scandir(first))[:1]:
        os.unlink(entry.path)
    assert rows(run)[1]["state"] == "incomplete"
    shutil.rmtree(first)
    assert rows(run) == {}


def test_a_shard_that_the_next_save_links(fresh: Live) -> None:
    fresh.mount()
    run = keeping(fresh.path / "run", keep=2)
    first = save(run, 1)
    data = (first / "shards" / "000.bin").read_bytes()
    second = run / "checkpoint-2"
    (second / "shards").mkdir(parents=True)
    os.link(first / "shards" / "000.bin", second / "shards" / "000.bin")
    (second / "trainer_state.json").write_text("{}")
    told = rows(run)
    assert (told[1]["size"], told[2]["size"]) == (2 * 64 * KIB + 2, 64 * KIB + 2)
    assert os.getxattr(first / "shards" / "000.bin", "user.retainz.generation") == b"2"
    save(run, 3)
    reaped(first)
    fresh.umount()
    fresh.mount()
    assert {number: row["state"] for number, row in rows(run).items()} == {
        2: "complete", 3: "complete",
    }  # fmt: skip
    assert rows(run)[2]["size"] == 64 * KIB + 2
    assert (second / "shards" / "000.bin").read_bytes() == data
    assert (second / "shards" / "000.bin").stat().st_nlink == 1
