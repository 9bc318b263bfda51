"""A training program that saves, and that stops at a chosen byte of a save to be killed there.

Runs in processes of their own (see `Trainer`); they are forked from one that has imported torch.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

PATIENCE_S = 30.0  # for what takes well under a second on an idle machine
TENSORS = 8
TENSOR_BYTES = 512 << 10
RAW_BYTES = 2 << 20
TERMINATED = 128 + signal.SIGTERM  # how a trainer exits that was told to end
State = dict[str, Any]


def state(step: int) -> State:
    """Return what is saved at a step: always the same, and nothing like that of another step."""
    generator = torch.Generator().manual_seed(step)
    tensors = {
        f"layer.{number}": torch.rand(TENSOR_BYTES // 4, generator=generator)
        for number in range(TENSORS)
    }
    return {"model": tensors, "step": step}


def noise(step: int) -> bytes:
    return random.Random(step).randbytes(RAW_BYTES)


class Meter:
    """A file of which the save calls `stop` when it has written `limit` bytes in all."""

    def __init__(self, limit: int, stop: Callable[[int], None]) -> None:
        self.written = 0
        self.limit = limit
        self.stop = stop

    def open(self, path: str | Path) -> MeteredFile:
        return MeteredFile(path, self)


class MeteredFile:
    """Writes at once, so that what was written is in the filesystem."""

    def __init__(self, path: str | Path, meter: Meter) -> None:
        self.raw = open(path, "wb", buffering=0)  # noqa: SIM115
        self.meter = meter

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        left = self.meter.limit - self.meter.written
        if 0 <= left < len(view):
            self._put(view[:left])
            self.meter.limit = -1
            self.meter.stop(self.meter.written)
            view = view[left:]
        self._put(view)
        return len(data)

    def _put(self, view: memoryview) -> None:
        while view:
            written = self.raw.write(view)
            self.meter.written += written
            view = view[written:]

    def flush(self) -> None:
        """Everything is written already."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()


# Ways of saving


def save(path: Path, step: int) -> None:
    """Save as people do: a file if the name says so, else a directory."""
    if path.suffix:
        torch.save(state(step), path)
    else:
        state_dict_saver.save(state(step), checkpoint_id=path, no_dist=True)


def save_file(path: Path, step: int, meter: Meter) -> None:
    """torch.save into a file that Python opened."""
    with meter.open(path) as file:
        torch.save(state(step), file)


def save_path(path: Path, step: int, meter: Meter) -> None:
    """torch.save to a path; stops between two tensors, the `limit`-th is next."""
    real = torch._C.PyTorchFileWriter.write_record

    def write_record(writer: Any, name: str, *rest: Any) -> None:
        if name == f"data/{meter.limit}":
            meter.stop(meter.limit)
        real(writer, name, *rest)

    torch._C.PyTorchFileWriter.write_record = write_record  # type: ignore[assignment,method-assign]
    torch.save(state(step), path)


def save_distributed(path: Path, step: int, meter: Meter, before_rename: bool = False) -> None:
    """PyTorch's distributed checkpoint, by one process."""

    class Metered(filesystem.FileSystem):
        @contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
            with meter.open(os.fspath(path)) as file:
                yield file

        def rename(self, path: Any, new_path: Any) -> None:
            if before_rename:
                meter.stop(meter.written)
            super().rename(path, new_path)

    writer = filesystem.FileSystemWriter(path)
    writer.fs = Metered()
    state_dict_saver.save(state(step), storage_writer=writer, no_dist=True)


def save_but_rename(path: Path, step: int, meter: Meter) -> None:
    """Stop when nothing but the rename of the marker is left to do."""
    save_distributed(path, step, meter, before_rename=True)


def save_raw(path: Path, step: int, meter: Meter) -> None:
    """A shard in a format that does not show whether it is whole."""
    with meter.open(path) as file:
        file.write(noise(step))


def save_in_a_thread(path: Path, step: int, meter: Meter) -> None:
    """The thread that opens the file has ended before it is written."""
    files: list[MeteredFile] = []
    opener = threading.Thread(target=lambda: files.append(meter.open(path)))
    opener.start()
    opener.join()
    files[0].write(noise(step))
    files[0].close()


def save_and_fail(path: Path, step: int, meter: Meter) -> None:
    """End with an error and an open file, as a library does that calls _exit."""
    file = meter.open(path)
    file.write(noise(step)[: RAW_BYTES // 2])
    os._exit(1)


Save = Callable[[Path, int, Meter], None]


def _run(save: Save, path: Path, step: int, limit: int, control: Connection) -> None:
    def terminated(*_: object) -> None:
        raise SystemExit(TERMINATED)

    def stop(written: int) -> None:
        control.send(written)
        control.recv()

    signal.signal(signal.SIGTERM, terminated)
    torch.set_num_threads(1)
    save(path, step, Meter(limit, stop))


class Trainer:
    """A process that saves once. With a `limit` it stops when it has written so many bytes."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["tests.trainer"])

    def __init__(self, save: Save, path: Path, step: int, limit: int = -1) -> None:
        self.control, theirs = self._context.Pipe()
        arguments = (save, path, step, limit, theirs)
        self.process = self._context.Process(target=_run, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def stopped(self) -> int:
        """Return how many bytes it has written when it has come to its limit."""
        assert self.control.poll(PATIENCE_S), "the save did not come to its limit"
        return int(self.control.recv())

    def go_on(self) -> None:
        self.control.send(None)

    def end(self, number: int = 0) -> int:
        """Send a signal, if one is given, and return how the process ended."""
        if number:
            assert self.process.pid is not None, "it was started"
            os.kill(self.process.pid, number)
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, "the trainer did not end"
        return self.process.exitcode


def same(step: int, loaded: State) -> bool:
    """Whether that is the state of the step, bit for bit."""
    expected = state(step)
    mine, theirs = expected["model"], loaded["model"]
    return (
        loaded["step"] == step
        and mine.keys() == theirs.keys()
        and all(_bits(mine[name]) == _bits(theirs[name]) for name in mine)
    )


def _bits(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def load(path: Path) -> State:
    """Load a file or a directory, whichever it is."""
    if path.is_file():
        loaded: State = torch.load(path)
        return loaded
    empty = {f"layer.{number}": torch.empty(TENSOR_BYTES // 4) for number in range(TENSORS)}
    target: State = {"model": empty, "step": -1}
    state_dict_loader.load(target, checkpoint_id=path, no_dist=True)
    return target


def files(path: Path) -> list[Path]:
    """Return what a save consists of."""
    return [path] if path.is_file() else list(path.iterdir())
