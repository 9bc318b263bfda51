"""What training programs do: torch, DCP with several ranks, safetensors, numpy, pickle."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from retainzfs.bench import targets
from retainzfs.bench.figures import Samples, interleaved
from retainzfs.bench.targets import MIB, Bench

TENSORS: Final = 32
WORLDS: Final = (1, 2, 4)
RANKS_S: Final = 600.0  # for all ranks of one save


def _missing(bench: Bench, measure: str, *modules: str) -> bool:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        bench.sheet.leave_out(measure, f"{', '.join(missing)} is not installed")
    return bool(missing)


def _state(nbytes: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415  what takes a second to import is imported where it is needed

    each = nbytes // TENSORS // 4
    return {f"layer{number}.weight": torch.rand(each) for number in range(TENSORS)}


def _durable(path: Path, save: Callable[[Path], object]) -> float:
    """Save, fsync; seconds. Where `close` is durable the fsync costs a round trip."""
    started = time.perf_counter()
    save(path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - started


@contextmanager
def _saved(bench: Bench, name: str, save: Callable[[Path], object]) -> Iterator[dict[str, Path]]:
    """The same file on three filesystems: retainzfs, the null one, that of the disk."""
    plain = bench.directory("plain")
    save(plain / name)
    with (
        targets.retainzfs(bench, "restore", 4 * bench.size) as ours,
        targets.peer(bench, "null", "null", plain / name) as null,
    ):
        run = ours.path / "run"
        run.mkdir()
        shutil.copyfile(plain / name, run / name)
        os.sync()
        yield {
            targets.host_type(plain): plain / name,
            "null": null.path / name,
            "retainzfs": run / name,
        }


def _restore(
    bench: Bench, what: str, files: dict[str, Path], load: Callable[[Path], object]
) -> None:
    """Read cold, then warm."""

    def warm(path: Path) -> float:
        started = time.perf_counter()
        load(path)
        return time.perf_counter() - started

    def cold(path: Path) -> float:
        targets.drop_caches()
        return warm(path)

    def measured(read: Callable[[Path], float]) -> Samples:
        return interleaved(bench.repetitions, {n: partial(read, path) for n, path in files.items()})

    host, sheet = next(iter(files)), bench.sheet
    if os.geteuid() == 0:
        samples = measured(cold)
        ours, null = samples["retainzfs"], samples["null"]
        sheet.ratio(f"{what}, cold: of null pyfuse3", null, ours, 0.9)
        sheet.ratio(f"{what}, cold: of {host}", samples[host], ours)
        size = files[host].stat().st_size / MIB
        for name, seconds in samples.items():
            sheet.add(f"{what}, cold: {name}", [size / each for each in seconds], "MiB/s")
    else:
        sheet.leave_out(f"{what}, cold", "to drop the page cache needs root")
    for path in files.values():
        load(path)
    samples = measured(warm)
    sheet.ratio(f"{what}, warm: of {host}", samples[host], samples["retainzfs"], 0.95)


def _touch(state: Any) -> None:
    """Read a byte of every page, as what is mapped has not been read yet."""
    for tensor in state.values():
        tensor.reshape(-1)[::1024].sum()


def bench_torch(bench: Bench) -> None:
    """torch.save, durable; torch.load, plain and mapped."""
    if _missing(bench, "torch", "torch"):
        return
    import torch  # noqa: PLC0415

    state = _state(2 * bench.size)
    plain = bench.directory("saves")
    host = targets.host_type(plain)
    with targets.retainzfs(bench, "torch", 8 * bench.size) as ours:
        run = ours.path / "run"
        run.mkdir()

        def saving(directory: Path) -> Callable[[], float]:
            numbers = itertools.count(1)

            def measure() -> float:
                path = directory / f"step-{next(numbers)}.pt"
                seconds = _durable(path, partial(torch.save, state))
                path.unlink()
                return seconds

            return measure

        samples = interleaved(bench.repetitions, {host: saving(plain), "retainzfs": saving(run)})
    size = f"{2 * bench.size >> 20} MiB"
    what = f"torch.save of {size}, durable: of {host}"
    bench.sheet.ratio(what, samples[host], samples["retainzfs"], 1.2)
    with _saved(bench, "step-1.pt", partial(torch.save, state)) as files:
        _restore(bench, "torch.load", files, torch.load)
        _restore(bench, "torch.load, mmap", files, lambda path: _touch(torch.load(path, mmap=True)))


def bench_safetensors(bench: Bench) -> None:
    """Save, load into memory, map."""
    if _missing(bench, "safetensors", "torch", "safetensors"):
        return
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    state = _state(bench.size)
    name = "model.safetensors"
    with _saved(bench, name, partial(save_file, state)) as files:
        host = next(iter(files))
        places = {key: path.parent for key, path in files.items() if key != "null"}
        samples = interleaved(
            bench.repetitions,
            {
                key: partial(_durable, to / "new.safetensors", partial(save_file, state))
                for key, to in places.items()
            },
        )
        bench.sheet.ratio(
            f"safetensors save, durable: of {host}", samples[host], samples["retainzfs"]
        )
        _restore(bench, "safetensors, mmap", files, lambda path: _touch(load_file(path)))


def bench_arrays(bench: Bench) -> None:
    """numpy.save and pickle, durable."""
    if _missing(bench, "numpy and pickle", "numpy"):
        return
    import numpy as np  # noqa: PLC0415

    array = np.random.default_rng(0).random(bench.size // 8)

    def saved(path: Path) -> None:
        np.save(path, array)

    def pickled(path: Path) -> None:
        with path.open("wb") as file:
            pickle.dump({"array": array}, file, protocol=5)

    plain = bench.directory("plain")
    host = targets.host_type(plain)
    with targets.retainzfs(bench, "arrays", 6 * bench.size) as ours:
        for what, save in (("numpy.save", saved), ("pickle", pickled)):
            samples = interleaved(
                bench.repetitions,
                {
                    key: partial(_durable, to / "array.npy", save)
                    for key, to in ((host, plain), ("retainzfs", ours.path))
                },
            )
            bench.sheet.ratio(f"{what}, durable: of {host}", samples[host], samples["retainzfs"])


def bench_dcp(bench: Bench) -> None:
    """DCP saves and loads of one, two and four ranks that have as much in all."""
    if _missing(bench, "DCP", "torch"):
        return
    plain = bench.directory("plain")
    host = targets.host_type(plain)
    saves: dict[tuple[str, int], list[float]] = {}
    loads: dict[tuple[str, int], list[float]] = {}
    slowest = []
    with targets.retainzfs(bench, "dcp", 4 * bench.size) as ours:
        places = {host: plain, "retainzfs": ours.path}
        numbers = itertools.count(1)
        for _ in range(bench.repetitions):
            for world, (key, path) in itertools.product(WORLDS, places.items()):
                directory = path / "run" / f"step-{next(numbers)}"
                os.sync()
                ranks = _ranks(directory, world, bench.size)
                saves.setdefault((key, world), []).append(max(r["save"] for r in ranks))
                loads.setdefault((key, world), []).append(max(r["load"] for r in ranks))
                if key == "retainzfs" and world == max(WORLDS):
                    speeds = [1 / r["write"] for r in ranks]
                    slowest.append(min(speeds) / statistics.mean(speeds))
                shutil.rmtree(directory)
    one, most = saves["retainzfs", 1], saves["retainzfs", max(WORLDS)]
    bench.sheet.ratio(f"DCP save: {max(WORLDS)} ranks of one", one, most, 0.95)
    bench.sheet.add("DCP save: the slowest rank's speed of the mean", slowest, "x", 0.7)
    for world in WORLDS:
        what = f"{world} rank{'s' * (world > 1)}: of {host}"
        bench.sheet.ratio(f"DCP save, {what}", saves[host, world], saves["retainzfs", world])
        bench.sheet.ratio(f"DCP load, {what}", loads[host, world], loads["retainzfs", world])


def _ranks(directory: Path, world: int, size: int) -> list[dict[str, float]]:
    """What each rank measured."""
    store = directory.parent.parent.parent / f"{directory.name}.store"
    command = [sys.executable, "-m", "retainzfs.bench.rank", str(directory), str(store)]
    share = size // world // MIB
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(share)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    answers = [process.communicate(timeout=RANKS_S)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{directory}: a rank failed")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]
