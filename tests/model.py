"""Random operations on a volume and on a dictionary, to compare the two."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from retainzfs.volume import RENAME_EXCHANGE, ROOT, FSError, Volume
from tests.helpers import DIRECTORY, FILE

NAMES = [b"a", b"b", b"step-1.pt", b"step-2.pt", b"step-3.pt", b"model-10.bin", b"log"]
DIRS = [b"run", b"run/step-5", b"other"]
SIZES = [1, 100, 256, 257, 4096, 5000, 20_000, 70_000, 300_000]


@dataclass
class Model:
    """What the tree must hold. `durable` is what a crash may not take back."""

    files: dict[bytes, bytearray] = field(default_factory=dict)
    durable: dict[bytes, bytes] = field(default_factory=dict)

    def path(self, rng: random.Random) -> bytes:
        base = rng.choice([b"", *(d + b"/" for d in DIRS)])
        return base + rng.choice(NAMES)


async def prepare(volume: Volume) -> None:
    for path in DIRS:
        parent, name = await split(volume, path)
        inode = await volume.make(parent, name, DIRECTORY, 0, 0)
        if name == b"run":
            await volume.setxattr(inode.ino, b"user.retainz.keep_last", b"2")


async def split(volume: Volume, path: bytes) -> tuple[int, bytes]:
    parent = ROOT
    *parts, name = path.split(b"/")
    for part in parts:
        parent = volume.lookup(parent, part).ino
    return parent, name


async def step(volume: Volume, model: Model, rng: random.Random) -> str:
    """Do one operation on both; return its name."""
    operation = rng.choice(
        ["write"] * 6 + ["append"] * 3 + ["truncate", "truncate", "unlink", "unlink", "rename",
         "rename", "exchange", "fsync", "fsync", "replace", "sync", "gc"]
    )  # fmt: skip
    path = model.path(rng)
    await globals()[f"_{operation}"](volume, model, rng, path)
    return operation


async def _open(volume: Volume, model: Model, path: bytes) -> int:
    parent, name = await split(volume, path)
    try:
        ino = volume.lookup(parent, name).ino
    except FSError:
        ino = (await volume.make(parent, name, FILE, 0, 0)).ino
        model.files[path] = bytearray()
    volume.open(ino)
    return ino


async def _close(volume: Volume, model: Model, path: bytes, ino: int) -> None:
    await volume.flush(ino)
    if volume.syncs(volume.inode(ino)):
        model.durable[path] = bytes(model.files[path])
    volume.close(ino)


async def _write(volume: Volume, model: Model, rng: random.Random, path: bytes) -> None:
    ino = await _open(volume, model, path)
    data = model.files[path]
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 10_000)
        new = rng.randbytes(rng.choice(SIZES))
        model.durable.pop(path, None)
        if at > len(data):
            data += bytes(at - len(data))
        data[at : at + len(new)] = new
        await volume.write(ino, at, new)
    await _close(volume, model, path, ino)


async def _append(volume: Volume, model: Model, rng: random.Random, path: bytes) -> None:
    ino = await _open(volume, model, path)
    new = rng.randbytes(rng.choice(SIZES))
    model.durable.pop(path, None)
    at = len(model.files[path])
    model.files[path] += new
    await volume.write(ino, at, new)
    await _close(volume, model, path, ino)


async def _replace(volume: Volume, model: Model, rng: random.Random, path: bytes) -> None:
    ino = await _open(volume, model, path)
    new = rng.randbytes(rng.choice(SIZES))
    model.durable.pop(path, None)
    await volume.setattr(ino, size=0)
    model.files[path] = bytearray(new)
    await volume.write(ino, 0, new)
    await _close(volume, model, path, ino)


async def _truncate(volume: Volume, model: Model, rng: random.Random, path: bytes) -> None:
    if path not in model.files:
        return
    parent, name = await split(volume, path)
    size = rng.randrange(len(model.files[path]) + 9000)
    model.durable.pop(path, None)
    await volume.setattr(volume.lookup(parent, name).ino, size=size)
    data = model.files[path]
    del data[size:]
    data += bytes(size - len(data))


async def _unlink(volume: Volume, model: Model, rng: random.Random, path: bytes) -> None:
    if path not in model.files:
        return
    parent, name = await split(volume, path)
    model.durable.pop(path, None)
    await volume.unlink(parent, name)
    del model.files[path]


async def _rename(volume: Volume, model: Model, rng: random.Random, path: bytes) -> None:
    target = model.path(rng)
    if path not in model.files or target == path:
        return
    model.durable.pop(path, None)
    model.durable.pop(target, None)
    await volume.rename(*await split(volume, path), *await split(volume, target))
    model.files[target] = model.files.pop(path)


async def _exchange(volume: Volume, model: Model, rng: random.Random, path: bytes) -> None:
    target = model.path(rng)
    if path not in model.files or target not in model.files or target == path:
        return
    model.durable.pop(path, None)
    model.durable.pop(target, None)
    await volume.rename(*await split(volume, path), *await split(volume, target), RENAME_EXCHANGE)
    model.files[target], model.files[path] = model.files[path], model.files[target]


async def _fsync(volume: Volume, model: Model, rng: random.Random, path: bytes) -> None:
    if path not in model.files:
        return
    parent, name = await split(volume, path)
    await volume.fsync(volume.lookup(parent, name).ino)
    model.durable[path] = bytes(model.files[path])


async def _sync(volume: Volume, model: Model, rng: random.Random, path: bytes) -> None:
    await volume.syncfs()
    model.durable = {p: bytes(d) for p, d in model.files.items()}


async def _gc(volume: Volume, model: Model, rng: random.Random, path: bytes) -> None:
    await volume.collect()
