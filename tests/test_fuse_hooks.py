"""The hooks in the real frameworks, on a real mount and on another filesystem."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from retainzfs import hints, hooks
from tests.conftest import run_python, wait_until
from tests.test_fuse_hints import states

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save  # noqa: E402

from retainzfs.hooks.dcp import Writer  # noqa: E402

pytestmark = [pytest.mark.fuse, pytest.mark.torch]

BYTES = 3 * (100_000 + 1) * 4  # of STATE's tensors


def state(value: float) -> dict[str, Any]:
    return {
        name: {"weight": torch.full((100_000,), float(value)), "step": torch.ones(1)}
        for name in ("a", "b", "c")
    }


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_warned", set())


@pytest.fixture
def unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no retention hints")
        yield


def warned_once(run: Callable[[], object]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    texts = [str(w.message) for w in caught if "retention hints" in str(w.message)]
    assert len(texts) == 1, texts
    assert "of a mounted retainzfs" in texts[0]


# PyTorch Distributed Checkpoint


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("unwarned")
def test_dcp_declares_and_commits(room: Path) -> None:
    hints.set(room, keep_last=2, reap=True)
    for step in range(1, 5):
        save(state(step), storage_writer=Writer(room / f"step-{step}"))
    wait_until(lambda: sorted(os.listdir(room)) == ["step-3", "step-4"], "it was not reaped")
    assert states(room) == [(3, "complete"), (4, "complete")]
    assert hints.get(room / "step-4").size == BYTES
    loaded = state(0)
    load(loaded, checkpoint_id=room / "step-4")
    assert torch.equal(loaded["b"]["weight"], state(4)["b"]["weight"])


class Unwritable:
    """Fails when DCP pickles it, behind the tensors."""

    def __reduce__(self) -> str:
        raise RuntimeError("the save fails here")


@pytest.mark.filterwarnings("ignore")
def test_a_failed_dcp_save_counts_for_nothing(room: Path) -> None:
    hints.set(room, keep_last=1, reap=True)
    save(state(1), storage_writer=Writer(room / "step-1"))
    with pytest.raises(CheckpointException):
        save(state(2) | {"z": Unwritable()}, storage_writer=Writer(room / "step-2"))
    assert [one for one in states(room) if one[1] == "complete"] == [(1, "complete")]
    assert (room / "step-1" / ".metadata").exists()


RANK = """
import os, sys, warnings
rank, room, collectives = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
os.environ["LOCAL_WORLD_SIZE"] = "1"
warnings.simplefilter("ignore")
import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from retainzfs import hints
from retainzfs.hooks.dcp import Writer
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[4]}/rendezvous", rank=rank,
                               world_size=2)
writer = Writer(f"{room}/node-{rank}/step-1")
tensors = {f"rank-{rank}": torch.full((100_000,), float(rank))}
dcp.save(tensors, storage_writer=writer, use_collectives=collectives)
if collectives:
    writer.commit()
told = hints.explain(writer.path)
print(told.state, hints.get(writer.path).size, sorted(os.listdir(writer.path)))
if collectives:
    later = Writer(f"{room}/node-{rank}/step-2")
    dcp.async_save(tensors, storage_writer=later).result()
    later.commit()
    assert hints.explain(later.path).state == "complete"
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("collectives", [True, False])
def test_each_rank_of_dcp_commits_on_a_mount_of_its_own(
    room: Path, tmp_path: Path, collectives: bool
) -> None:
    """A directory for each node stands for its mount: the marker appears in that of rank 0."""

    def run(rank: int) -> Any:
        return run_python(RANK, str(rank), str(room), str(collectives), str(tmp_path))

    with ThreadPoolExecutor() as pool:
        done = list(pool.map(run, range(2)))
    for rank, one in enumerate(done):
        assert one.returncode == 0, one.stderr
        assert one.stdout.startswith("complete 400000 "), one.stdout
        assert (room / f"node-{rank}" / "step-1" / f"__{rank}_0.distcp").exists()
    marker = ".metadata" if collectives else "__1.metadata"
    assert (marker in done[1].stdout) is not collectives, done[1].stdout


@pytest.mark.filterwarnings("ignore")
def test_dcp_runs_unchanged_elsewhere(tmp_path: Path) -> None:
    def run() -> None:
        for step in range(1, 4):
            save(state(step), storage_writer=Writer(tmp_path / f"step-{step}"))

    warned_once(run)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-3"]
    assert all(os.listxattr(path) == [] for path in tmp_path.rglob("*"))


# Hugging Face Trainer


def train_hf(output: Path, steps: int = 12, **changes: Any) -> None:
    """Train with the callback, a save every second step; `losses` are those of the evaluations."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    hook = import_module("retainzfs.hooks.transformers")
    losses = iter(changes.pop("losses", ()))

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            loss = (self.layer(x) - labels).square().mean()
            return {"loss": loss if self.training else torch.tensor(next(losses))}

    data = [{"x": torch.ones(8) * i, "labels": torch.ones(8)} for i in range(8)]
    if "load_best_model_at_end" in changes:
        changes |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8}
    arguments = transformers.TrainingArguments(
        str(output), max_steps=steps, save_steps=2, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], disable_tqdm=True, **changes,
    )  # fmt: skip
    transformers.Trainer(
        Model(), arguments, train_dataset=data, eval_dataset=data[:1],
        callbacks=[hook.RetentionCallback()],
    ).train()  # fmt: skip


def checkpoints(output: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("checkpoint-")) for p in output.glob("checkpoint-*"))


@pytest.mark.usefixtures("unwarned")
def test_hf_takes_keep_last_from_save_total_limit(room: Path) -> None:
    train_hf(room / "run", save_total_limit=2)
    assert hints.get(room / "run") == hints.Attributes(keep_last=2)
    assert states(room) == [(10, "complete"), (12, "complete")]
    assert checkpoints(room / "run") == [10, 12]
    assert all("keep_last=2" in row.origin for row in hints.generations(room))


@pytest.mark.usefixtures("unwarned")
def test_hf_leaves_alone_what_is_set_and_reap_deletes(room: Path) -> None:
    hints.set(room, keep_last=3, reap=True)
    train_hf(room / "run", save_total_limit=None)
    wait_until(lambda: checkpoints(room / "run") == [8, 10, 12], "it was not reaped")
    assert hints.get(room / "run") == hints.Attributes()


@pytest.mark.usefixtures("unwarned")
def test_hf_anchors_the_best(room: Path) -> None:
    hints.set(room, keep_last=2, reap=True)
    train_hf(
        room / "run", load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=False, losses=[3.0, 2.0, 1.0, 4.0, 5.0, 6.0],
    )  # fmt: skip
    wait_until(lambda: checkpoints(room / "run") == [6, 10, 12], "it was not reaped")
    assert [(row.number, row.anchor) for row in hints.generations(room)] == [
        (6, True),
        (10, False),
        (12, False),
    ]


def test_hf_runs_unchanged_elsewhere(tmp_path: Path) -> None:
    warned_once(lambda: train_hf(tmp_path / "run", save_total_limit=2))
    assert checkpoints(tmp_path / "run") == [10, 12]


# Lightning


def train_lightning(output: Path, losses: list[float], **changes: Any) -> None:
    """Train with the callback, one save an epoch; `losses` are what the epochs log."""
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
    demos = import_module("lightning.pytorch.demos.boring_classes")
    callback = import_module("retainzfs.hooks.lightning").RetentionCallback()

    class Model(demos.BoringModel):  # type: ignore[misc,name-defined]
        def on_train_epoch_end(self) -> None:
            self.log("loss", losses[self.current_epoch])

    warnings.filterwarnings("ignore", module=r"lightning.*")
    lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=len(losses), limit_train_batches=2,
        limit_val_batches=0, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[lightning.callbacks.ModelCheckpoint(output, **changes), callback],
    ).fit(Model())  # fmt: skip


def epochs(output: Path) -> list[int]:
    return sorted(int(p.name.split("=")[1].split("-")[0]) for p in output.glob("epoch=*"))


@pytest.mark.usefixtures("unwarned")
def test_lightning_anchors_what_is_kept_for_its_metric(room: Path) -> None:
    """The run's own policy would delete what ModelCheckpoint goes by; the anchors keep it."""
    hints.set(room, keep_last=1, reap=True)
    losses = [3.0, 1.0, 2.0, 5.0, 1.5, 6.0]
    train_lightning(room / "run", losses, monitor="loss", save_top_k=2, save_last=True)
    rows = hints.generations(room)
    assert epochs(room / "run") == [1, 4]
    assert [(row.state, row.anchor) for row in rows] == [("complete", True)] * 2
    assert hints.get(room / "run") == hints.Attributes()
    assert (room / "run" / "last.ckpt").exists()


@pytest.mark.usefixtures("unwarned")
def test_lightning_takes_keep_last_from_save_top_k(room: Path) -> None:
    train_lightning(room / "run", [0.0] * 4)
    assert hints.get(room / "run") == hints.Attributes(keep_last=1)
    (row,) = hints.generations(room)
    assert (row.state, row.anchor) == ("complete", False)
    assert "keep_last=1" in row.origin


def test_lightning_runs_unchanged_elsewhere(tmp_path: Path) -> None:
    warned_once(lambda: train_lightning(tmp_path / "run", [3.0, 1.0, 2.0], monitor="loss"))
    assert epochs(tmp_path / "run") == [1]
