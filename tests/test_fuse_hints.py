"""The public module for training code on a real mount."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from retainzfs import hints, unmounting
from retainzfs.errors import BadAttribute, IncompleteGeneration, NoGeneration
from tests.conftest import PATIENCE_S, Live, run_python, wait_until

pytestmark = pytest.mark.fuse

DATA = bytes(range(256)) * 4096  # 1 MiB


class Interrupted(Exception):
    """What ends a save in the middle."""


def states(directory: Path) -> list[tuple[int, str]]:
    return [(row.number, row.state) for row in hints.generations(directory)]


def save(run: Path, step: int, data: bytes = DATA) -> None:
    with hints.generation(run / f"step-{step}", size=len(data)) as directory:
        (directory / "model.bin").write_bytes(data)


def fail(run: Path, step: int) -> None:
    with hints.generation(run / f"step-{step}") as directory:
        (directory / "model.bin").write_bytes(DATA)
        raise Interrupted


# Attributes


def test_what_is_set_is_read_back_and_set_again(room: Path) -> None:
    hints.set(
        room, keep_last=3, cadence="30m", keep_every=500, anchor=False, birth=-1.5, retire=math.inf,
        size="8G", file_class="output", reap=True, commit=5,
    )  # fmt: skip
    expected = hints.Attributes(
        3, 1800.0, 500, False, -1.5, math.inf, 8 << 30, hints.FileClass.OUTPUT, True, 5.0
    )
    assert hints.get(room) == expected
    (room / "other").mkdir()
    hints.set(room / "other", **dataclasses.asdict(hints.get(room)))
    assert hints.get(room / "other") == expected
    assert hints.is_retainzfs(room)
    assert hints.is_retainzfs(room / "not" / "yet")


def test_get_tells_of_the_path_itself_and_explain_what_holds(room: Path, live: Live) -> None:
    hints.set(room, keep_last=3)
    run = room / "run"
    run.mkdir()
    hints.set(run, cadence=90)
    assert hints.get(run) == hints.Attributes(cadence=90.0)
    told = hints.explain(run)
    assert told.path == f"/{run.relative_to(live.path)}"
    assert told.attributes["keep_last"] == hints.Stated(3, f"/{room.relative_to(live.path)}")
    assert told.file_class is hints.FileClass.CHECKPOINT
    assert (told.generation, told.state) == (None, None)
    save(run, 7)
    told = hints.explain(run / "step-7")
    assert (told.generation, told.state, told.stream) == (7, "complete", hints.explain(run).path)
    assert told.birth_epoch is not None
    assert told.retire_epoch == pytest.approx(told.birth_epoch + 3 * 90)


def test_clear_takes_some_or_all_and_leaves_what_is_not_ours(room: Path) -> None:
    os.setxattr(room, "user.color", b"blue")
    hints.set(room, keep_last=3, cadence=90, file_class="cache")
    hints.clear(room, "file_class", "anchor")
    assert hints.get(room) == hints.Attributes(keep_last=3, cadence=90.0)
    with pytest.raises(BadAttribute, match="keep_first"):
        hints.clear(room, "keep_last", "keep_first")
    assert hints.get(room).keep_last == 3
    hints.clear(room)
    assert os.listxattr(room) == ["user.color"]


def test_all_or_none_when_the_mount_refuses_one(room: Path) -> None:
    hints.set(room, keep_last=3, cadence=10)
    with pytest.raises(BadAttribute, match=r"retire.*999999"):
        hints.set(room, keep_last=5, reap=True, retire=999_999_999)
    assert hints.get(room) == hints.Attributes(keep_last=3, cadence=10.0)


def test_all_or_none_without_permission(room: Path) -> None:
    room.chmod(0o755)
    code = (
        "import os, sys\nfrom retainzfs import hints\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "hints.set(sys.argv[1], keep_last=3, reap=True)"
    )
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    done = run_python(code, str(room))
    assert "PermissionError" in done.stderr
    assert str(room) in done.stderr
    assert hints.get(room) == hints.Attributes()


# Saves


def test_a_directory_is_made_declared_and_committed(room: Path) -> None:
    run = room / "a" / "run"
    with hints.generation(run / "step-1", size="1M", anchor=True) as directory:
        assert directory == run / "step-1"
        assert hints.get(directory).size == 1 << 20
        (directory / "model.bin").write_bytes(DATA)
        assert states(run) == [(1, "writing")]
    (row,) = hints.generations(run)
    assert (row.number, row.state, row.anchor, row.size) == (1, "complete", True, len(DATA))


def test_a_single_file(room: Path) -> None:
    run = room / "run"
    with hints.generation(run / "step-1.bin", size=len(DATA), anchor=True) as file:
        assert list(run.iterdir()) == []
        assert hints.get(run).size == len(DATA)
        file.write_bytes(DATA)
    (row,) = hints.generations(run)
    assert (row.number, row.state, row.anchor) == (1, "complete", True)


@pytest.mark.parametrize("again", [False, True])
def test_a_failed_save_counts_for_nothing(room: Path, again: bool) -> None:
    """The older ones stay, and the failed one is never complete, not at the next save either."""
    hints.set(room, keep_last=1, reap=True)
    save(room, 1)
    with pytest.raises(Interrupted):
        fail(room, 2)
    assert states(room) == [(1, "complete"), (2, "writing")]
    assert (room / "step-1" / "model.bin").read_bytes() == DATA
    save(room, 2 if again else 3)
    wait_until(lambda: not (room / "step-1").exists(), "it was not reaped")
    after = [(2, "complete")] if again else [(2, "incomplete"), (3, "complete")]
    assert states(room) == after


def test_a_killed_save_is_incomplete_after_a_remount(fresh: Live) -> None:
    fresh.mount()
    run = fresh.path / "run"
    save(run, 1)
    code = (
        "import os, signal, sys\nfrom retainzfs import hints\n"
        "with hints.generation(sys.argv[1]) as directory:\n"
        "    (directory / 'model.bin').write_bytes(bytes(1 << 20))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    run_python(code, str(run / "step-2"))
    fresh.umount()
    fresh.mount()
    assert states(run) == [(1, "complete"), (2, "incomplete")]


def test_reap_leaves_the_newest_two(room: Path) -> None:
    hints.set(room, keep_last=2, reap=True)
    for step in range(1, 7):
        save(room, step)
    wait_until(lambda: sorted(os.listdir(room)) == ["step-5", "step-6"], "it was not reaped")
    assert states(room) == [(5, "complete"), (6, "complete")]
    assert (room / "step-5" / "model.bin").read_bytes() == DATA


@pytest.mark.parametrize("name", ["final", "step-5.log", "step-1/step-2"])
def test_a_name_without_a_generation_is_refused_before_anything_is_made(
    room: Path, name: str
) -> None:
    with pytest.raises(NoGeneration, match=name):
        hints.generation(room / "new" / name, size="1G").__enter__()
    assert list(room.iterdir()) == []


def test_a_bad_size_makes_nothing(room: Path) -> None:
    with pytest.raises(BadAttribute, match="size"):
        hints.generation(room / "step-1", size="big").__enter__()
    assert list(room.iterdir()) == []


def test_commit_needs_something_to_complete(room: Path) -> None:
    (room / "step-1").mkdir()
    for path in (room, room / "step-1"):
        with pytest.raises(NoGeneration, match=str(path)):
            hints.commit(path)
    with pytest.raises(NoGeneration, match="nothing written"), hints.generation(room / "step-2"):
        pass
    with pytest.raises(FileNotFoundError):
        hints.commit(room / "step-3")


def test_a_commit_survives_a_killed_daemon(fresh: Live) -> None:
    """commit() and wait_durable() promise it when they return; closing a file does not here."""
    fresh.mount()
    run = fresh.path / "run"
    run.mkdir()
    hints.set(run, commit="1h")
    save(run, 1)
    (run / "checkpoint-2").mkdir()
    (run / "checkpoint-2" / "model.bin").write_bytes(DATA)
    (run / "checkpoint-2" / "trainer_state.json").write_text("{}")
    hints.wait_durable(run / "checkpoint-2")
    fresh.signal(signal.SIGKILL)
    unmounting.detach(str(fresh.path), lazy=True)
    fresh.mount()
    assert states(run) == [(1, "complete"), (2, "complete")]
    assert (run / "checkpoint-2" / "model.bin").read_bytes() == DATA


# wait_durable


def test_waiting_ends_when_another_thread_has_saved(room: Path) -> None:
    begin = threading.Event()

    def saves() -> None:
        begin.wait(PATIENCE_S)
        save(room, 1)

    saver = threading.Thread(target=saves)
    saver.start()
    with pytest.raises(TimeoutError, match="not begun"):
        hints.wait_durable(room / "step-1", timeout=0.05)
    begin.set()
    hints.wait_durable(room / "step-1", timeout=PATIENCE_S)
    assert hints.explain(room / "step-1").state == "complete"
    saver.join()


def test_waiting_for_a_writer_ends_in_time(room: Path) -> None:
    (room / "step-1").mkdir()
    with (room / "step-1" / "model.bin").open("wb") as file:
        file.write(DATA)
        file.flush()
        before_s = time.monotonic()
        with pytest.raises(TimeoutError, match=r"step-1.*writing|writing.*step-1") as caught:
            hints.wait_durable(room / "step-1", timeout=0.2)
        assert 0.2 <= time.monotonic() - before_s < PATIENCE_S
        assert caught.value.filename == str(room / "step-1")
    hints.commit(room / "step-1")
    hints.wait_durable(room / "step-1", timeout=0)


def test_waiting_for_a_failed_save_tells_why(room: Path) -> None:
    (room / "run").mkdir()
    (room / "run" / "step-1.pt").write_bytes(b"PK\3\4" + bytes(10_000))
    with pytest.raises(IncompleteGeneration, match=r"step-1\.pt: generation 1 is incomplete: .+"):
        hints.wait_durable(room / "run" / "step-1.pt")
    (reason,) = [row.reason for row in hints.generations(room)]
    assert reason
    with pytest.raises(IncompleteGeneration) as caught:
        hints.wait_durable(room / "run" / "step-1.pt")
    assert reason in str(caught.value)


def test_waiting_for_what_is_no_generation(room: Path) -> None:
    (room / "log.txt").write_text("")
    for name in ("log.txt", "missing.txt"):
        with pytest.raises(NoGeneration, match=name):
            hints.wait_durable(room / name)
    with pytest.raises(FileNotFoundError):
        hints.wait_durable(room / "missing" / "step-1")


def test_waiting_for_a_file_with_a_retirement_of_its_own(room: Path) -> None:
    file = room / "notes"
    file.touch()
    hints.set(file, anchor=True)
    file.write_bytes(DATA)
    with pytest.raises(TimeoutError):
        hints.wait_durable(file, timeout=0.05)
    hints.commit(file)
    hints.wait_durable(file, timeout=PATIENCE_S)


def test_waiting_goes_on_for_what_is_only_presumed(room: Path) -> None:
    """As on a mount that the marker of a distributed save never reaches."""
    for step in (1, 2):
        (room / f"step-{step}").mkdir()
        (room / f"step-{step}" / "__1_0.distcp").write_bytes(DATA)
    assert [(row.state, row.presumed) for row in hints.generations(room)] == [
        ("complete", True),
        ("writing", False),
    ]
    with pytest.raises(TimeoutError, match="presumed"):
        hints.wait_durable(room / "step-1", timeout=0.05)
    hints.commit(room / "step-1")
    hints.wait_durable(room / "step-1", timeout=PATIENCE_S)
    assert not hints.explain(room / "step-1").presumed


def test_a_table_that_is_longer_than_an_attribute(room: Path) -> None:
    run = room / ("run" + 200 * "x")
    run.mkdir()
    save(room / "run", 7)
    for step in range(150):
        (run / f"step-{step}.bin").write_bytes(b"x")
    with pytest.raises(OSError, match="too long"):
        os.getxattr(run, "user.retainz.generations")
    assert [row.number for row in hints.generations(run)] == list(range(150))
