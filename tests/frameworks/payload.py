"""A job of a real model's size loses its filesystem in the middle of a save, and goes on.

`python -m tests.frameworks.payload` is a process of the job: it trains, saves as the framework
does, and prints a line after each step: what the loss was, and SHA-256 sums of the state. The
daemon kills itself when half of the last save has come to it. `recover` unmounts, checks the image,
mounts again, and lets another process restore the newest complete save and train on: state and
steps have to be those of the process before.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retainzfs import fsck
from tests.conftest import COMMAND_S, Live
from tests.frameworks.catalogue import STEPS
from tests.frameworks.job import Job, Timeline
from tests.frameworks.measure import TREE
from tests.frameworks.smollm import Shape

KEEP = {"torchtitan": 2, "megatron": 1}
"""How many saves each keeps. Megatron keeps the newest, and none of ours is a milestone."""
STATES = 3  # of each parameter: itself and both moments of AdamW
SINGLE = 4  # bytes of a number

# For the daemon, before it mounts: it dies when so many more bytes have been written.
KILL = """
import mmap, os, signal
from retainzfs.volume import Volume
with open({path!r}, "r+b") as file:
    left = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
real = Volume.write
async def write(volume, ino, offset, data):
    if 0 < left[0] <= len(data):
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= min(left[0], len(data))
    return await real(volume, ino, offset, data)
Volume.write = write
"""


@dataclass(frozen=True)
class State:
    """What a job has behind a step, to the bit."""

    step: int
    loss: str  # of that step
    parameters: str  # SHA-256, as are the others
    optimizer: str
    generator: str


@dataclass(frozen=True)
class Recovery:
    """What became of a job. Sizes in bytes, times in seconds."""

    framework: str
    parameters: int
    save: int
    """Of one save, as the mount tells it."""
    acknowledged: int
    """Steps of the last save that had ended."""
    written: int
    """Of the save that did not end, when the daemon died."""
    states: tuple[tuple[int, str], ...]
    """Number and state of the generations after the next mount."""
    damage: tuple[str, ...]
    """What fsck found of it in the image, every checksum compared."""
    restored: int
    """Step of the save that was restored."""
    differences: tuple[str, ...]
    """Fields of the restored state, and of the next step, that are not those of the reference."""
    kept: tuple[int, ...]
    """In the end, behind the save that the daemon did not live to see."""
    train_seconds: float
    mount_seconds: float
    resume_seconds: float


class Program(Protocol):
    """A framework's loop, as `torchtitan` and `megatron` here have it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, number: int) -> float: ...

    def save(self, step: int) -> None: ...

    def load(self) -> int: ...


# The job


def main(name: str, act: str, directory: str, layers: str, vocabulary: str, saves: str) -> None:
    """Train all saves, or resume; `directory`/../budget is what the daemon may still take."""
    told = sys.stdout
    sys.stdout = sys.stderr  # frameworks print
    top = Path(directory)
    job = Job(top, int(saves), KEEP[name], Timeline(top.parent.parent / "clock"))
    module = importlib.import_module(f"tests.frameworks.{name}")
    shape = Shape(int(layers), int(vocabulary))
    with module.without_gpu() if name == "megatron" else contextlib.nullcontext():
        program: Program = module.Program(job, shape)
        done = 0
        if act == "resume":
            done = program.load()
            tell(told, program, done, 0.0)
        for step in range(done + 1, STEPS * job.saves + 1):
            tell(told, program, step, program.step(step))
            if act == "train" and step == STEPS * job.saves:
                arm(top.parent.parent / "budget", size(shape) // 2)
            program.save(step)
            if step % STEPS == 0:
                print(json.dumps({"saved": step}), file=told, flush=True)


def tell(told: Any, program: Program, step: int, loss: float) -> None:
    state = State(
        step,
        loss.hex(),
        digest(program.model.state_dict()),
        digest(program.optimizer.state_dict()["state"]),
        digest(torch.get_rng_state()),
    )
    print(json.dumps(asdict(state)), file=told, flush=True)


def digest(value: Any) -> str:
    """Return the SHA-256 of tensors in nested dictionaries, in the order of their keys."""
    found = hashlib.sha256()
    for name, tensor in tensors(value):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    else:
        for key in sorted(value):
            yield from tensors(value[key], f"{name}/{key}")


def size(shape: Shape) -> int:
    """Return the bytes of a save, without what is small."""
    return STATES * SINGLE * shape.parameters


def arm(path: Path, nbytes: int) -> None:
    """Let the daemon die after so many bytes."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8) as budget:
        budget[:] = nbytes.to_bytes(8, "little")


# Around it


def recover(live: Live, name: str, shape: Shape, saves: int) -> Recovery:
    """Train until the daemon is killed in the middle of the last save, recover, and compare."""
    budget = live.base / "budget"
    budget.write_bytes(bytes(8))
    live.mount(patch=KILL.format(path=str(budget)))
    top = live.path / "run"
    top.mkdir()
    os.setxattr(top, "user.retainz.keep_last", str(KEEP[name]).encode())
    arguments = [str(top), str(shape.layers), str(shape.vocabulary), str(saves)]
    started = time.monotonic()
    lines, logged = train(live, [name, "train", *arguments])
    trained = time.monotonic()
    left = int.from_bytes(budget.read_bytes(), "little")
    live.umount()
    report = fsck.check(str(live.image), scrub=True)
    mounting = time.monotonic()
    live.mount()
    mounted = time.monotonic()
    rows = generations(top)
    done = subprocess.run(
        command(name, "resume", *arguments), capture_output=True, text=True, check=False, cwd=TREE
    )
    if done.returncode:
        raise RuntimeError(f"{name}: resuming failed:\n{done.stderr[-4000:]}\nbefore:\n{logged}")
    resumed = time.monotonic()
    reference, saved = parsed(lines)
    after, _ = parsed(done.stdout.splitlines())
    restored = min(after)
    newest = max((row for row in rows if row["state"] == "complete"), key=lambda r: r["number"])
    kept = tuple(row["number"] for row in generations(top) if row["state"] == "complete")
    live.umount()
    return Recovery(
        name,
        shape.parameters,
        newest["size"],
        max(saved),
        size(shape) // 2 - left,
        tuple((row["number"], row["state"]) for row in rows),
        tuple(str(finding) for finding in report.findings if finding.damage),
        restored,
        tuple(differences(reference, after)),
        kept,
        trained - started,
        mounted - mounting,
        resumed - mounted,
    )


def train(live: Live, arguments: list[str]) -> tuple[list[str], str]:
    """Run the job until its filesystem dies under it; return what it told, and its log."""
    out, log = live.base / "told", live.base / "job.log"
    daemon = os.pidfd_open(live.pid)
    with out.open("wb") as told, log.open("wb") as logged:
        job = subprocess.Popen(
            command(*arguments), stdout=told, stderr=logged, cwd=TREE, start_new_session=True
        )
        process = os.pidfd_open(job.pid)
        waiting = select.poll()
        waiting.register(daemon, select.POLLIN)
        waiting.register(process, select.POLLIN)
        waiting.poll(None)
        # The machine crashes: whatever the job makes of it is not what is tested.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait(COMMAND_S)
    os.close(process)
    died = bool(select.select([daemon], [], [], 0)[0])
    os.close(daemon)
    if not died:
        raise RuntimeError(f"the job ended before the daemon died:\n{log.read_text()[-4000:]}")
    return out.read_text().splitlines(), log.read_text()[-4000:]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.frameworks.payload", *arguments]


def generations(top: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(os.getxattr(top, "user.retainz.generations"))
    return rows


def parsed(lines: list[str]) -> tuple[dict[int, State], list[int]]:
    """Return the states by their step, and the steps of which a save has ended."""
    told = [json.loads(line) for line in lines]
    states = {row["step"]: State(**row) for row in told if "step" in row}
    return states, [row["saved"] for row in told if "saved" in row]


def differences(reference: dict[int, State], after: dict[int, State]) -> Iterator[str]:
    """Yield what is different in what a restored job told; its first state has no loss."""
    restored = min(after)
    for step, state in after.items():
        for name in (field.name for field in fields(State)):
            same = getattr(state, name) == getattr(reference[step], name)
            if not same and (step, name) != (restored, "loss"):
                yield f"step {step}: {name}"


if __name__ == "__main__":
    main(*sys.argv[1:])
