"""The trainer dies, or the device is full, in the middle of a save: what was saved before stays.

Each death is at a byte that the test chose: the trainer stops there, says so, and is killed.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from retainzfs import mkfs
from tests.conftest import Live

pytest.importorskip("torch", reason="needs torch: scripts/setup-environment test")

from torch.distributed.checkpoint.api import CheckpointException

from tests import trainer
from tests.trainer import Trainer

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

MIB = 1 << 20
WAYS = {"file": trainer.save_file, "distributed": trainer.save_distributed}
SUFFIX = {"file": ".pt", "distributed": ""}


class Run:
    """A stream of which the filesystem keeps the newest generations."""

    def __init__(self, directory: Path, way: str, keep: int = 1) -> None:
        self.directory = directory
        self.way = way
        directory.mkdir(exist_ok=True)
        os.setxattr(directory, "user.retainz.keep_last", b"%d" % keep)
        os.setxattr(directory, "user.retainz.reap", b"1")

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}{SUFFIX[self.way]}"

    def save(self, step: int) -> None:
        trainer.save(self.path(step), step)

    def start(self, step: int, share: float) -> Trainer:
        """Start a save and return when it has written a share of its bytes."""
        started = Trainer(WAYS[self.way], self.path(step), step, int(self.size() * share))
        assert started.stopped() == int(self.size() * share)
        return started

    def size(self) -> int:
        """Return how many bytes a save writes."""
        newest = self.path(max(self.states("complete")))
        return sum(file.stat().st_size for file in trainer.files(newest))

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(
            os.getxattr(self.directory, "user.retainz.generations")
        )
        return rows

    def states(self, only: str = "") -> dict[int, str]:
        told = {row["number"]: row["state"] for row in self.rows()}
        return {number: state for number, state in told.items() if not only or state == only}

    def reason(self, step: int) -> str:
        return next(str(row["reason"]) for row in self.rows() if row["number"] == step)

    def holds(self, *complete: int, other: dict[int, str] | None = None) -> None:
        """Check which steps there are, and that the complete ones load as they were saved."""
        expected = dict.fromkeys(complete, "complete") | (other or {})
        assert self.states() == expected
        assert set(os.listdir(self.directory)) == {self.path(step).name for step in expected}
        for step in complete:
            assert trainer.same(step, trainer.load(self.path(step)))


@pytest.fixture(params=WAYS)
def run(room: Path, request: pytest.FixtureRequest) -> Run:
    return Run(room, request.param)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_killed_trainer_costs_nothing(run: Run, share: float) -> None:
    run.save(1)
    assert run.start(2, share).end(signal.SIGKILL) == -signal.SIGKILL
    run.holds(1, other={2: "incomplete"})
    assert "killed" in run.reason(2)
    run.save(3)
    run.holds(3, other={2: "incomplete"})


def test_a_trainer_that_ends_by_an_exception(run: Run) -> None:
    """It closes its files itself. Of a directory nothing shows that, until the next save."""
    run.save(1)
    assert run.start(2, 0.5).end(signal.SIGTERM) > 0
    run.holds(1, other={2: "incomplete" if run.way == "file" else "writing"})
    run.save(3)
    run.holds(3, other={2: "incomplete"})
    assert run.reason(2) != "None"


@pytest.mark.parametrize("tensors", [0, 4, 7])
def test_an_exception_between_two_tensors(room: Path, tensors: int) -> None:
    """torch.save then ends the archive properly; only some tensors are not in it."""
    run = Run(room, "file")
    run.save(1)
    terminated = Trainer(trainer.save_path, run.path(2), 2, tensors)
    terminated.stopped()
    assert terminated.end(signal.SIGTERM) == trainer.TERMINATED
    run.holds(1, other={2: "incomplete"})
    assert run.reason(2) == f"{trainer.TENSORS - tensors} of {trainer.TENSORS} tensors are missing"
    run.save(3)
    run.holds(3, other={2: "incomplete"})


def test_killed_before_the_marker_has_its_name(room: Path) -> None:
    run = Run(room, "distributed")
    run.save(1)
    killed = Trainer(trainer.save_but_rename, run.path(2), 2)
    killed.stopped()
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL
    assert sorted(os.listdir(run.path(2))) == [".metadata.tmp", "__0_0.distcp"]
    run.holds(1, other={2: "writing"})
    run.save(3)
    run.holds(3, other={2: "incomplete"})
    run.save(2)
    run.holds(2)


def test_killed_while_a_generation_is_saved_again(room: Path, run: Run) -> None:
    """Its old bytes are gone by the trainer's own hand; those of the others are not."""
    run = Run(room, run.way, keep=2)
    run.save(1)
    run.save(2)
    assert run.start(2, 0.5).end(signal.SIGKILL) == -signal.SIGKILL
    run.holds(1, other={2: "incomplete"})
    run.save(2)
    run.holds(1, 2)
    run.save(3)
    run.holds(2, 3)


def test_the_next_mounts_know_what_died(fresh: Live) -> None:
    fresh.mount()
    runs = [Run(fresh.path / way, way) for way in WAYS]
    for run in runs:
        run.save(1)
        run.start(2, 0.5).end(signal.SIGKILL)
    fresh.signal(signal.SIGKILL)
    for steps in ((1,), (3,)):
        fresh.umount()
        fresh.mount()
        for run in runs:
            run.holds(*steps, other={2: "incomplete"})
            assert run.reason(2) == "it was not complete at the last unmount"
            run.save(3)


def test_trainer_and_filesystem_die_together(fresh: Live) -> None:
    fresh.mount()
    runs = [Run(fresh.path / way, way) for way in WAYS]
    for run in runs:
        run.save(1)
    saves = [run.start(2, 0.5) for run in runs]
    for run in runs:
        for file in trainer.files(run.path(2)):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    fresh.signal(signal.SIGKILL)
    for save in saves:
        save.end(signal.SIGKILL)
    fresh.umount()
    fresh.mount()
    for run in runs:
        run.holds(1, other={2: "incomplete"})
        assert run.reason(2) == "the mount ended while it was being written"
        run.save(3)
        run.holds(3, other={2: "incomplete"})


# Several writers


def test_one_of_several_writers_is_killed(room: Path) -> None:
    """A marker that is written all the same, by one who has not noticed, does not count."""
    run = Run(room, "distributed")
    run.save(1)
    step = run.path(2)
    step.mkdir()
    shards = [step / f"__{rank}_0.distcp" for rank in range(3)]
    writers = [Trainer(trainer.save_raw, shard, 2, trainer.RAW_BYTES // 2) for shard in shards]
    for writer in writers:
        writer.stopped()
    assert writers[1].end(signal.SIGKILL) == -signal.SIGKILL
    for writer in (writers[0], writers[2]):
        writer.go_on()
        assert writer.end() == 0
    (step / ".metadata.tmp").write_bytes(b"x" * 1000)
    (step / ".metadata.tmp").rename(step / ".metadata")
    run.holds(1, other={2: "incomplete"})
    assert "killed" in run.reason(2)
    run.save(3)
    run.holds(3, other={2: "incomplete"})


def test_a_file_for_each_rank(room: Path) -> None:
    """A generation does not count while one of its files is being written, nor when that fails."""
    run = Run(room, "file")

    def rank(number: int, step: int, limit: int) -> Trainer:
        path = room / f"ep1-ba{step}-rank{number}.pt"
        started = Trainer(trainer.save_raw, path, step, limit)
        started.stopped()
        return started

    def finish(*writers: Trainer) -> None:
        for writer in writers:
            writer.go_on()
            assert writer.end() == 0

    finish(rank(0, 1, 1), rank(1, 1, 1))
    first, second = rank(0, 2, 1), rank(1, 2, trainer.RAW_BYTES - 1)
    finish(first)
    assert run.states() == {1: "complete", 2: "writing"}
    second.end(signal.SIGKILL)
    assert run.states() == {1: "complete", 2: "incomplete"}
    first, second = rank(0, 3, 1), rank(1, 3, 1)
    second.end(signal.SIGKILL)
    finish(first)
    assert run.states() == {1: "complete", 2: "incomplete", 3: "incomplete"}
    assert (room / "ep1-ba1-rank0.pt").read_bytes() == trainer.noise(1)
    first, second = rank(0, 4, 1), rank(1, 4, 1)
    finish(first, second)
    assert run.states() == {2: "incomplete", 3: "incomplete", 4: "complete"}


@pytest.mark.parametrize(
    ("save", "limit"),
    [
        pytest.param(trainer.save_in_a_thread, trainer.RAW_BYTES - 1, id="opened by a thread"),
        pytest.param(trainer.save_and_fail, -1, id="ends with an error"),
    ],
)
def test_a_death_that_only_the_process_shows(room: Path, save: trainer.Save, limit: int) -> None:
    """The format does not tell, and the length is right or the first of its kind."""
    run = Run(room, "file")
    run.save(1)
    dying = Trainer(save, room / "weights-2.msgpack", 2, limit)
    if limit < 0:
        assert dying.end() == 1
    else:
        dying.stopped()
        dying.end(signal.SIGKILL)
    assert run.states() == {1: "complete", 2: "incomplete"}


# A full device


@pytest.fixture
def small(fresh: Live) -> Live:
    mkfs.make(str(fresh.image), size=64 * MIB, force=True)
    fresh.mount()
    return fresh


def leave(live: Live, room: int) -> Path:
    """Fill the device, and give back as much room for what retires soon as is asked for."""
    (live.path / "filler").mkdir(exist_ok=True)
    os.setxattr(live.path / "filler", "user.retainz.keep_last", b"1")
    filler = live.path / "filler" / "step-1.msgpack"
    with filler.open("wb", buffering=0) as file:
        for piece in (MIB, 64 << 10, 4 << 10):
            with pytest.raises(OSError, match="No space"):
                file.writelines(itertools.repeat(os.urandom(piece)))
    os.truncate(filler, filler.stat().st_size - room)
    os.setxattr(live.path, "user.retainz.gc", b"1")
    return filler


@pytest.mark.parametrize("way", WAYS)
def test_a_full_device_costs_nothing(small: Live, way: str) -> None:
    run = Run(small.path / "run", way)
    run.save(1)
    # A stream that deletes in time may borrow a zone, which here holds an eighth of a save.
    for step, share in enumerate((0.1, 0.5, 0.85), start=2):
        filler = leave(small, int(run.size() * share))
        with pytest.raises((OSError, RuntimeError, CheckpointException)):
            run.save(step)
        run.holds(step - 1, other={step: "incomplete"})
        assert run.reason(step) == "a write to it failed"
        filler.unlink()
        run.save(step)
        run.holds(step)


def test_only_the_incomplete_save_is_given_up_for_room(small: Live) -> None:
    run = Run(small.path / "run", "file")
    run.save(1)
    leave(small, int(run.size() * 1.5))
    run.save(2)
    run.holds(2)
    with pytest.raises((OSError, RuntimeError)):
        (run.directory / "step-3.pt").write_bytes(os.urandom(2 * run.size()))
    run.holds(2, other={3: "incomplete"})
    (run.directory / "step-3.pt").unlink()
    run.save(3)
    run.holds(3)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_retry_without_truncation(small: Live, reopened: bool) -> None:
    """What was refused has to be written, no more: then the save counts."""
    run = Run(small.path / "run", "file")
    data = trainer.noise(2)
    (run.directory / "weights-1.msgpack").write_bytes(data)
    path = run.directory / "weights-2.msgpack"
    filler = leave(small, len(data) // 2)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    written = 0
    with pytest.raises(OSError, match="No space") as caught:  # noqa: PT012
        while written < len(data):
            written += os.write(fd, data[written:])
    assert caught.value.errno == errno.ENOSPC
    filler.unlink()
    if reopened:
        os.close(fd)
        assert run.states() == {1: "complete", 2: "incomplete"}
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, data[:written])
        os.close(fd)
        assert run.states() == {1: "complete", 2: "incomplete"}, "the rest is still missing"
        fd = os.open(path, os.O_WRONLY)
    for at in range(0, len(data), 300_000):
        os.pwrite(fd, data[at : at + 300_000], at)
    os.close(fd)
    assert run.states() == {2: "complete"}
    assert path.read_bytes() == data
