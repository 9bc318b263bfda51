"""Real checkpoints of real frameworks through a real mount."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from retainzfs import mkfs
from tests.conftest import Live

pytestmark = [pytest.mark.fuse, pytest.mark.torch]

torch = pytest.importorskip("torch")


def state(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 256))
    return {"model": model.state_dict(), "step": seed, "history": list(range(1000))}


def same(one: dict[str, object], other: dict[str, object]) -> bool:
    mine, theirs = one["model"], other["model"]
    assert isinstance(mine, dict)
    assert isinstance(theirs, dict)
    tensors = all(torch.equal(mine[name], theirs[name]) for name in mine)
    return tensors and mine.keys() == theirs.keys() and one["history"] == other["history"]


@pytest.mark.parametrize("mapped", [False, True])
def test_save_and_load(room: Path, mapped: bool) -> None:
    for step in range(1, 4):
        torch.save(state(step), room / f"step-{step}.pt")
    for step in range(1, 4):
        loaded = torch.load(room / f"step-{step}.pt", mmap=mapped)
        assert same(loaded, state(step))


def test_saves_are_complete_generations(room: Path) -> None:
    for step in (10, 20):
        torch.save(state(step), room / f"step-{step}.pt")
    rows = json.loads(os.getxattr(room, "user.retainz.generations"))
    assert [(row["number"], row["state"]) for row in rows] == [(10, "complete"), (20, "complete")]


def test_a_torn_save_is_incomplete(room: Path) -> None:
    torch.save(state(1), room / "step-1.pt")
    whole = (room / "step-1.pt").read_bytes()
    (room / "step-2.pt").write_bytes(whole[: len(whole) // 2])
    rows = json.loads(os.getxattr(room, "user.retainz.generations"))
    assert [(row["number"], row["state"]) for row in rows] == [(1, "complete"), (2, "incomplete")]


def test_saves_survive_a_remount(fresh: Live) -> None:
    fresh.mount()
    (fresh.path / "run").mkdir()
    os.setxattr(fresh.path / "run", "user.retainz.keep_last", b"2")
    os.setxattr(fresh.path / "run", "user.retainz.reap", b"1")
    for step in range(1, 6):
        torch.save(state(step), fresh.path / "run" / f"step-{step}.pt")
    fresh.umount()
    fresh.mount()
    assert sorted(os.listdir(fresh.path / "run")) == ["step-4.pt", "step-5.pt"]
    for step in (4, 5):
        assert same(torch.load(fresh.path / "run" / f"step-{step}.pt"), state(step))


def test_a_full_device_during_a_save(fresh: Live) -> None:
    mkfs.make(str(fresh.image), size=64 << 20, force=True)
    fresh.mount()
    saved = 0
    tensors = [torch.rand(2 << 20) for _ in range(16)]  # 8 MiB each
    with pytest.raises((OSError, RuntimeError)):  # noqa: PT012
        for number, tensor in enumerate(tensors):
            torch.save(tensor, fresh.path / f"step-{number}.pt")
            saved += 1
    assert saved >= 4
    rows = json.loads(os.getxattr(fresh.path, "user.retainz.generations"))
    assert [row["state"] for row in rows] == ["complete"] * saved + ["incomplete"]
    (fresh.path / "step-0.pt").unlink()
    torch.save(tensors[saved], fresh.path / f"step-{saved}.pt")
    for number in range(1, saved + 1):
        assert torch.equal(torch.load(fresh.path / f"step-{number}.pt"), tensors[number])


def test_safetensors(room: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.arange(300_000), "b": torch.rand(64, 64)}
    safetensors.save_file(tensors, room / "model-7.safetensors")
    loaded = safetensors.load_file(room / "model-7.safetensors")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    rows = json.loads(os.getxattr(room, "user.retainz.generations"))
    assert [(row["number"], row["state"]) for row in rows] == [(7, "complete")]


def test_numpy_maps(room: Path) -> None:
    numpy = pytest.importorskip("numpy")
    made = numpy.memmap(room / "array", dtype="float32", mode="w+", shape=(1000, 1000))
    made[:] = numpy.arange(1_000_000, dtype="float32").reshape(1000, 1000)
    made.flush()
    again = numpy.memmap(room / "array", dtype="float32", mode="r", shape=(1000, 1000))
    assert (again == made).all()
    numpy.savez(room / "step-3.npz", one=made, two=numpy.ones(10))
    with numpy.load(room / "step-3.npz") as archive:
        assert (archive["one"] == made).all()
