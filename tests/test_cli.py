"""The commands: results on standard output, messages on standard error, exit codes."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retainzfs import cli, layout, mounts
from retainzfs.cli import zonemap
from retainzfs.cli.output import Progress, print_table
from tests.conftest import COMMAND, Live, retainzfs

COMMANDS = (
    *("mkfs", "mount", "umount", "status", "zones", "generations", "hint", "fsck", "gc", "scrub"),
    "replay",
)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code and what it said."""
    code = cli.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def loaded(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


# Usage


@pytest.mark.pure
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"retainzfs {command}" in capsys.readouterr().out


@pytest.mark.pure
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["mkfs"],
        ["mkfs", "image", "--size", "much"],
        ["mount", "image"],
        ["hint"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "usage: retainzfs" in said.err


@pytest.mark.pure
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mount", "image", "dir", "-o", "bogus"], "unknown mount option 'bogus'"),
        (["mount", "image", "dir", "--create"], "--size"),
        (["mount", "image", "dir", "--size", "1G"], "--create"),
        (["mkfs", "/nonexistent/image"], "--size"),
        (["fsck", "image", "--rate", "1M"], "--scrub"),
        (["mkfs", "mem:64M"], "memory needs no format"),
    ],
)
def test_wrong_combinations_are_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("retainzfs: ")
    assert message in err


@pytest.mark.pure
def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert re.fullmatch(r"retainzfs \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.volume
def test_the_module_runs_as_a_program() -> None:
    done = retainzfs("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.pure
def test_paths_that_are_on_no_mount(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status"], ["zones"], ["generations"], ["hint"], ["gc"], ["scrub"]):
        code, out, err = run(capsys, *command, tmp_path)
        assert (code, out) == (1, ""), command
        assert err.startswith(
            f"retainzfs: {tmp_path}: no file or directory of a mounted retainzfs. "
        )
        code, out, err = run(capsys, *command, tmp_path / "missing")
        assert (code, out) == (1, ""), command
        assert err == f"retainzfs: {tmp_path}/missing: No such file or directory\n"
    code, _, err = run(capsys, "umount", tmp_path)
    assert code == 1
    assert err == f"retainzfs: {tmp_path}: no retainzfs is mounted there\n"


# mkfs and fsck


@pytest.mark.volume
def test_mkfs_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "image"
    code, out, err = run(
        capsys, "mkfs", image, "--size", "64M", "--zone-size", "1M", "--zone-capacity", "768K"
    )
    assert (code, err) == (0, "")
    assert out == (f"{image}: 63 zones of 1 MiB, 768 KiB usable each; 8 open, 14 active at most\n")
    assert image.stat().st_size == 64 << 20
    assert run(capsys, "fsck", image)[0] == 0


@pytest.mark.volume
def test_mkfs_keeps_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "image"
    assert run(capsys, "mkfs", image, "--size", "64M")[0] == 0
    before = image.read_bytes()
    code, out, err = run(capsys, "mkfs", image)
    assert (code, out) == (1, "")
    assert "--force" in err
    assert image.read_bytes() == before
    assert run(capsys, "mkfs", image, "--force")[0] == 0
    other = tmp_path / "other"
    code, _, err = run(capsys, "mkfs", other, "--size", "1M")
    assert code == 1
    assert "too small" in err
    code, _, err = run(capsys, "mkfs", other, "--size", "64M", "--zone-size", "1000000")
    assert code == 2
    assert not other.exists()


@pytest.mark.volume
def test_fsck_of_what_is_no_filesystem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "image"
    code, _, err = run(capsys, "fsck", image)
    assert code == 1
    assert "no such target" in err
    image.write_bytes(bytes(10 << 20))
    code, _, err = run(capsys, "fsck", image)
    assert code == 1
    assert "not a retainzfs target" in err


@pytest.mark.fuse
def test_fsck_prints_names_that_are_no_text(fresh: Live) -> None:
    fresh.mount()
    name = os.fsencode(fresh.path) + b"/\xff"
    content = os.urandom(5000)
    with open(name, "wb") as file:
        file.write(content)
    fresh.umount()
    _flip(fresh.image, content[:64])
    done = subprocess.run(
        [*COMMAND, "fsck", "--scrub", str(fresh.image)],
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert b": damage: /\xff: bytes 0 to" in done.stdout


def test_fsck_of_two_bad_headers_is_a_finding(fresh: Live) -> None:
    with fresh.image.open("r+b") as file:
        for copy in (0, 1):
            file.seek(copy * layout.BLOCK + 20)
            file.write(b"1")
    done = retainzfs("fsck", "--json", fresh.image)
    assert done.returncode == 3
    [finding] = json.loads(done.stdout)["findings"]
    assert "both copies of the header" in finding["text"]


def test_fsck_finds_damage(fresh: Live, capsys: pytest.CaptureFixture[str]) -> None:
    fresh.mount()
    content = os.urandom(3 << 20)
    (fresh.path / "file").write_bytes(content)
    (fresh.path / "other").write_bytes(bytes(1 << 20))
    code, _, err = run(capsys, "fsck", fresh.image)
    assert code == 1
    assert "in use" in err
    fresh.umount()
    code, out, err = run(capsys, "fsck", fresh.image, "--scrub")
    assert (code, out) == (0, "")
    assert "2 files" in err
    assert "no damage" in err
    _flip(fresh.image, content[1 << 20 :][:64])
    assert run(capsys, "fsck", fresh.image)[0] == 0, "without --scrub no data is read"
    code, out, err = run(capsys, "fsck", fresh.image, "--scrub")
    assert code == 3
    assert "/file" in out
    assert "checksum mismatch" in out
    assert "/other" not in out
    code, out, _ = run(capsys, "fsck", fresh.image, "--scrub", "--rate", "1G", "--json")
    assert code == 3
    report = json.loads(out)
    assert report["damaged"]
    assert len(report["findings"]) == 1
    fresh.expected = ["checksum mismatch"]
    fresh.mount()
    with pytest.raises(OSError, match="Input/output error"):
        (fresh.path / "file").read_bytes()
    assert (fresh.path / "other").read_bytes() == bytes(1 << 20)


def _flip(image: Path, needle: bytes) -> None:
    """Change a byte of the image where it holds these."""
    with image.open("r+b") as file:
        at = file.read().index(needle)
        file.seek(at)
        file.write(bytes([needle[0] ^ 0xFF]))


# What a mount tells


def _saves(directory: Path, steps: range, size: int = 1 << 20) -> None:
    for step in steps:
        (directory / f"step-{step}.pt").write_bytes(os.urandom(size))


@pytest.mark.fuse
def test_status(live: Live, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _saves(room, range(1, 4))
    status = loaded(capsys, "status", room)
    assert status["target"] == str(live.image)
    assert set(status) >= {
        *("capacity", "used", "free", "dead", "tail", "zones", "write_amplification"),
        *("logical_bytes", "host_bytes", "copied_bytes", "decision_us", "classes", "streams"),
    }
    assert set(status["zones"]) >= {"empty", "open", "active", "full", "reset_total"}
    assert set(status["classes"]) == {"checkpoint", "cache", "scratch", "output"}
    stream = next(s for s in status["streams"] if s["path"] == f"/{room.name}")
    assert stream["newest_committed"] == 3
    _, out, _ = run(capsys, "status", "--json")
    everything = json.loads(out)
    assert str(live.image) in [one["target"] for one in everything]
    code, out, err = run(capsys, "status", live.path)
    assert (code, err) == (0, "")
    assert str(live.image) in out
    assert "MiB" in out
    assert f"/{room.name}" in out


@pytest.mark.fuse
def test_status_of_a_dead_mount_hides_no_other(
    live: Live, fresh: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh.mount()
    fresh.signal(signal.SIGKILL)
    code, out, err = run(capsys, "status")
    assert code == 1
    assert str(live.image) in out
    assert f"{fresh.path}: dead" in err
    assert f"retainzfs umount {fresh.path}" in err
    fresh.umount()


@pytest.mark.fuse
def test_generations(live: Live, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _saves(room, range(8, 12))
    rows = loaded(capsys, "generations", room)
    assert [row["number"] for row in rows] == [8, 9, 10, 11]
    assert [row["state"] for row in rows] == ["complete"] * 4
    assert [row["size"] for row in rows] == [1 << 20] * 4
    assert rows[0]["path"] == f"/{room.name}/step-8.pt"
    assert set(rows[0]) >= {"birth_epoch", "retire_epoch", "origin", "zones", "published"}
    code, out, _ = run(capsys, "generations", room)
    assert code == 0
    assert out.splitlines()[0].split()[:3] == ["NUMBER", "STATE", "SIZE"]
    assert len(out.splitlines()) == 5
    everything = loaded(capsys, "generations", live.path)
    assert {row["path"] for row in rows} <= {row["path"] for row in everything}


@pytest.mark.fuse
def test_more_generations_than_an_attribute_holds(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "one more"):
        (room / name).mkdir()
        _saves(room / name, range(400), size=10)
    with pytest.raises(OSError, match="too long|out of range"):  # noqa: RUF043
        os.getxattr(room, "user.retainz.generations")
    rows = loaded(capsys, "generations", room)
    assert len(rows) == 800
    assert len(loaded(capsys, "generations", room / "one")) == 400


@pytest.mark.fuse
def test_no_generations(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generations", room)
    assert (code, out) == (0, "")
    assert "no generations" in err
    assert loaded(capsys, "generations", room) == []
    code, out, err = run(capsys, "generations", room, "--history")
    assert (code, out) == (0, "")
    assert "no deleted generations" in err
    _saves(room, range(7, 8))
    code, out, err = run(capsys, "generations", room / "step-7.pt")
    assert (code, out) == (0, "")
    assert f"belongs to generation 7 of /{room.name}," in err


@pytest.mark.fuse
def test_names_that_would_break_a_table(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ = room / "a\nb\x1b[2J"
    run_.mkdir()
    _saves(run_, range(1, 2))
    _, out, _ = run(capsys, "generations", run_)
    assert len(out.splitlines()) == 2
    assert rf"/{room.name}/a\x0ab\x1b[2J/step-1.pt" in out
    _, out, _ = run(capsys, "hint", run_ / "step-1.pt", "--anchor")
    assert out.startswith(rf"/{room.name}/a\x0ab\x1b[2J/step-1.pt" + "\n")
    assert "\x1b" not in out


@pytest.mark.fuse
def test_the_keys_that_attributes_md_lists(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "attributes.md").read_text()
    os.setxattr(room, "user.retainz.keep_last", b"1")
    _saves(room, range(1, 3))
    (room / "step-1.pt").unlink()
    stated = loaded(capsys, "hint", room)["attributes"]["keep_last"]
    for command, told, more in (
        (["generations"], loaded(capsys, "generations", room)[0], set()),
        (["hint"], loaded(capsys, "hint", room), {*stated, "glob", "attributes"}),
        (["generations", "--history"], loaded(capsys, "generations", room, "--history")[0], set()),
    ):
        row = re.search(rf"^\| `{' '.join(command)}` \| (.*) \|$", page, re.MULTILINE)
        assert row is not None, command
        assert set(re.findall(r"`(\w+)`", row[1])) == {*told, *more}, command


@pytest.mark.fuse
def test_paths_on_a_mount_that_have_no_attributes(
    live: Live, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(room / "fifo")
    for path in (room / "fifo", live.path / ".retainz", live.path / ".retainz" / "stats.json"):
        code, out, err = run(capsys, "hint", path)
        assert (code, out) == (1, "")
        assert err.startswith(f"retainzfs: {path}: no file or directory of a mounted retainzfs. ")


@pytest.mark.fuse
def test_hint_sets_shows_and_clears(
    live: Live, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "hint", room, "--keep-last", "3", "--cadence", "30m", "--reap")
    assert (code, err) == (0, "")
    assert f"keep_last = 3, set on /{room.name}" in out
    assert "  cadence = 1800 s" in out
    assert os.getxattr(room, "user.retainz.reap") == b"1"
    assert live.path.exists()
    _saves(room, range(1, 2))
    explained = loaded(capsys, "hint", room / "step-1.pt")
    assert explained["attributes"]["keep_last"] == {"value": 3, "from": f"/{room.name}"}
    assert explained["layout"] == "plain"
    assert explained["stream"] == f"/{room.name}"
    assert explained["retire_epoch"] == pytest.approx(explained["birth_epoch"] + 3 * 1800)
    code, out, _ = run(capsys, "hint", room / "step-1.pt", "--anchor")
    assert "retires never" in out
    code, out, _ = run(capsys, "hint", room, "--clear", "--class", "scratch")
    assert "keep_last" not in out
    assert "class: scratch" in out
    assert os.listxattr(room) == ["user.retainz.class"]


@pytest.mark.fuse
def test_hint_refuses_bad_values_before_it_changes_any(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "hint", room, "--keep-last", "3", "--class", "best")
    assert (code, out) == (2, "")
    assert "checkpoint, cache, scratch or output" in err
    assert os.listxattr(room) == []
    for option in ("--quota", "--reserve", "--publish"):
        code, out, err = run(capsys, "hint", room, option, "1G")
        assert (code, out) == (1, "")
        assert err == f"retainzfs: {option}: not supported by this version\n"


@pytest.mark.fuse
def test_gc(live: Live, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _saves(room, range(1, 9), size=3 << 20)
    for step in range(1, 9, 2):
        (room / f"step-{step}.pt").unlink()
    code, out, err = run(capsys, "gc", live.path)
    assert (code, out, err) == (0, "", "")
    for step in range(2, 9, 2):
        assert (room / f"step-{step}.pt").stat().st_size == 3 << 20


@pytest.mark.fuse
def test_gc_says_who_may(
    live: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def setxattr(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "setxattr", setxattr)
    code, out, err = run(capsys, "gc", live.path)
    assert (code, out) == (1, "")
    assert "only root and the user who mounted it" in err


@pytest.mark.fuse
def test_a_dead_mount(fresh: Live, capsys: pytest.CaptureFixture[str]) -> None:
    fresh.mount()
    fresh.signal(signal.SIGKILL)
    for command in ("status", "zones", "generations", "hint"):
        for path in (fresh.path, fresh.path / "name the kernel has not cached"):
            code, out, err = run(capsys, command, path)
            assert (code, out) == (1, ""), command
            assert f"retainzfs umount {fresh.path}" in err
    code, out, err = run(capsys, "mount", fresh.image, fresh.path)
    assert code == 1
    assert "mounted there" in err
    assert run(capsys, "umount", fresh.path) == (0, "", "")
    assert mounts.find_mount(str(fresh.path)) is None


@pytest.mark.fuse
def test_the_reader_of_a_pipe_may_leave(live: Live) -> None:
    process = subprocess.Popen(
        [*COMMAND, "zones", str(live.path), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(60)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.pure
def test_progress_is_redrawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress("scrub")
    for done in range(1, 1001):
        progress(done << 20, 1000 << 20)
    text = terminal.getvalue()
    assert text.count("\r") == 99
    assert text.endswith("\n")
    assert "scrub: 50%, 500 MiB of 1000 MiB" in text


@pytest.mark.pure
def test_progress_is_terse_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("scrub")
    for done in range(1, 41):
        progress(done << 30, 40 << 30)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["40%,", "80%,"]


# The zone map


def _zone(index: int, condition: str, kind: str | None, live: int = 0) -> dict[str, Any]:
    return {"index": index, "condition": condition, "class": kind, "live": live, "dead": 0}


ZONES = [
    _zone(0, "open", "metadata", 4096),
    _zone(1, "full", "finite", 8192),
    _zone(2, "closed", "finite"),
    _zone(3, "full", "anchor"),
    _zone(4, "offline", "cache"),
    *(_zone(index, "empty", None) for index in range(5, 40)),
]


@pytest.mark.pure
def test_the_map_has_a_letter_for_each_zone() -> None:
    lines = list(zonemap.drawn(ZONES, 30, coloured=False))
    rows = lines[: lines.index("")]
    assert [line[:6].strip() for line in rows] == ["0", "16", "32"]
    assert "".join(line[8:].replace(" ", "") for line in rows) == "mFfAx" + "." * 35
    assert all(len(line) <= 30 for line in rows)
    legend = "\n".join(lines[len(rows) :])
    assert re.search(r"f finite +2 zones  8 KiB live", legend)
    assert re.search(r"\. empty +35 zones", legend)
    assert re.search(r"x offline +1 zones", legend)


@pytest.mark.pure
def test_colours_only_add_colours() -> None:
    plain = list(zonemap.drawn(ZONES, 80, coloured=False))
    coloured = list(zonemap.drawn(ZONES, 80, coloured=True))
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in coloured] == plain
    assert coloured[0] != plain[0]


@pytest.mark.fuse
def test_zones(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    zones = loaded(capsys, "zones", live.path)
    assert [zone["index"] for zone in zones] == list(range(len(zones)))
    for zone in zones:
        assert set(zone) >= {
            *("index", "condition", "class", "write_pointer", "capacity"),
            *("live", "dead", "tail", "retire_min", "retire_max"),
        }
    code, out, err = run(capsys, "zones", live.path)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "metadata" in out


@pytest.mark.pure
def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NAME", "SIZE"), [("a", "1 MiB"), ("longer", "23 MiB")], right="SIZE")
    assert capsys.readouterr().out == "NAME      SIZE\na        1 MiB\nlonger  23 MiB\n"
    print_table(("NAME",), [])
    assert capsys.readouterr().out == ""
