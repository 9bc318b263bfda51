"""A training job that saves on a mount, and a server that forks one whenever it is asked.

`python -m tests.training STEPS` writes one line to standard output: what an undisturbed run of so
many steps gives. Then it takes a job a line from standard input, runs it in a process of its own,
and answers with the exit code. Importing torch takes seconds, forking does not.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.promises import Record

SEED: Final = 20
WIDTH: Final = 48
KEPT: Final = 2  # saves
FILES: Final = ("__0_0.distcp", ".metadata")  # of a save
PAGE: Final = 4096
TABLE_PAGES: Final = 48  # of the file that is rewritten in pieces
DISCONNECTED: Final = 7  # exit code: the mount is dead


class Trainer:
    """A model with dropout, its optimizer, and the generator that both data and dropout use."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.step = 0
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 3 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(3 * WIDTH, WIDTH),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self) -> list[Any]:
        """Take one step. Return its number, the loss, and a checksum of everything that counts."""
        data = torch.randn(16, WIDTH)
        loss = (self.model(data) - data.roll(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return [self.step, loss.item().hex(), self.checksum()]

    def checksum(self) -> str:
        """Parameters, optimizer state and generator, every bit."""
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
        optimizer = self.optimizer.state_dict()
        digest.update(repr(optimizer["param_groups"]).encode())
        for number, state in sorted(optimizer["state"].items()):
            for name, tensor in sorted(state.items()):
                digest.update(f"{number}.{name}".encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        generator = torch.get_rng_state()
        return {"model": model, "optimizer": optimizer, "rng": generator, "step": self.step}

    def save(self, directory: Path) -> None:
        save(self._state(), checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        state = self._state()
        load(state, checkpoint_id=directory)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        torch.set_rng_state(state["rng"])
        self.step = state["step"]


class Job:
    """Training with saves on a mount, and with files beside them that make the mount work."""

    def __init__(self, root: Path, record: Path) -> None:
        self.root = root
        self.run = root / "run"
        self.record = Record(record, root)
        self.random = random.Random(record.name)

    def go(self, steps: int) -> None:
        """Go on behind the newest whole save and take so many steps."""
        self._set_up()
        trainer = Trainer()
        saves = [path for path in self.run.iterdir() if (path / ".metadata").exists()]
        if saves:
            trainer.load(max(saves, key=_number))
        self.record.note("restored", trainer.step)
        for _ in range(steps):
            self.record.note("step", *trainer.train())
            self._save(trainer)
            self._log(trainer.step)
            self._rewrite_table()
            self._replace(self.root / "latest.json", trainer.step)
            self._replace(self.root / "results" / "best.json", trainer.step)
            self._keep(trainer.step)
            os.setxattr(self.root, "user.retainz.gc", b"1")

    def _set_up(self) -> None:
        for name in ("run", "kept", "results", "cache"):
            (self.root / name).mkdir(exist_ok=True)
        os.setxattr(self.run, "user.retainz.keep_last", b"%d" % KEPT)
        os.setxattr(self.run, "user.retainz.reap", b"1")
        os.setxattr(self.root / "kept", "user.retainz.anchor", b"1")
        os.setxattr(self.root / "results", "user.retainz.class", b"output")
        os.setxattr(self.root / "cache", "user.retainz.class", b"cache")

    def _save(self, trainer: Trainer) -> None:
        directory = self.run / f"step-{trainer.step}"
        for other in self.run.iterdir():
            if _number(other) <= trainer.step - KEPT:  # deleted once this save is complete
                for name in FILES:
                    self.record.will(other / name, None)
        trainer.save(directory)
        for name in FILES:
            self.record.did(directory / name, (directory / name).read_bytes())
        self.record.note("saved", trainer.step)

    def _log(self, step: int) -> None:
        path = self.root / "train.log"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for line in range(4):
            at = os.fstat(fd).st_size
            data = f"step {step}, line {line}\n".encode() * 50
            os.write(fd, data)
            os.fsync(fd)
            self.record.did(path, data, at)
        os.close(fd)

    def _rewrite_table(self) -> None:
        """Write pages here and there, so that zones are left with holes."""
        path = self.root / "table"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        fresh = not os.fstat(fd).st_size
        for pages in range(3):
            some = range(TABLE_PAGES) if fresh else self.random.sample(range(TABLE_PAGES), 8)
            written = {page * PAGE: self.random.randbytes(PAGE) for page in some}
            for at, data in written.items():
                self.record.will(path, data, at)
                os.pwrite(fd, data, at)
            os.fsync(fd)
            for at, data in written.items():
                self.record.did(path, data, at)
            fresh = False
            (self.root / "cache" / f"{pages}").write_bytes(self.random.randbytes(3 * PAGE))
        os.close(fd)

    def _replace(self, path: Path, step: int) -> None:
        """Write a file beside and rename it over. Inside class output that is durable at once."""
        beside = path.with_suffix(".new")
        data = json.dumps({"step": step, "noise": self.random.random()}).encode() * 100
        beside.write_bytes(data)
        self.record.will(path, data)
        beside.rename(path)
        if path.parent == self.root:
            self._sync_directory(path.parent)
        self.record.did(path, data)

    def _keep(self, step: int) -> None:
        """Keep an anchor, and delete the one before last."""
        path, old = (self.root / "kept" / f"step-{number}.bin" for number in (step, step - 2))
        data = self.random.randbytes(10 * PAGE)
        self.record.doubt(path)
        path.write_bytes(data)
        os.setxattr(path, "user.retainz.commit", b"1")
        self.record.did(path, data)
        if old.exists():
            self.record.will(old, None)
            old.unlink()
            self._sync_directory(old.parent)
            self.record.did(old, None)

    @staticmethod
    def _sync_directory(path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _number(save: Path) -> int:
    return int(save.name.removeprefix("step-"))


def work(root: Path, record: Path, steps: int) -> int:
    """Run a job; return the exit code."""
    try:
        Job(root, record).go(steps)
    except (OSError, RuntimeError, CheckpointException):
        try:
            os.statvfs(root)  # nothing that the kernel would answer by itself
        except OSError as error:
            if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
                return DISCONNECTED
        traceback.print_exc()
        return 1
    return 0


def prepare() -> None:
    """Make this process one that repeats itself, and from which jobs can be forked."""
    warnings.simplefilter("ignore")  # that there is no process group
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def main() -> None:
    prepare()
    undisturbed = Trainer()
    print(json.dumps([undisturbed.train() for _ in range(int(sys.argv[1]))]), flush=True)
    for line in sys.stdin:
        root, record, steps = json.loads(line)
        child = os.fork()
        if not child:
            code = 1
            try:
                code = work(Path(root), Path(record), steps)
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
