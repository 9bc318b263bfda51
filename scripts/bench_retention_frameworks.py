"""What training frameworks do with files, for `bench_retention.py`.

One function a framework: it writes generation `number` of a job and deletes what the job keeps no
longer, in the framework's order. Names, orders and markers are those of the sources of TorchTitan
0.3, megatron-core 0.19, transformers 5.24, accelerate 1.15, Lightning 2.6, NeMo 2, Orbax 0.12,
DeepSpeed, Composer and TensorFlow. DeepSpeed and the loops delete nothing by themselves: what is
replayed is the usual few lines that list the directory and remove all but the newest K.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from retainzfs.volume import ROOT, Volume

FILE, DIRECTORY, LINK = 0o100644, 0o040755, 0o120777
PIECE = 1 << 20  # the kernel's longest write
SMALL = 4000  # bytes of what is not weights
_NOISE = memoryview(os.urandom(PIECE))  # what bytes there are makes no difference
_ZIP_END = b"PK\5\6" + bytes(12)


@dataclass
class Job:
    """A job with a directory of its own. Times are seconds, sizes bytes."""

    name: str
    keep: int
    every: int  # every so many saves one is a milestone; 0: none is
    stride: int  # training steps between two saves
    cadence_s: float
    size: int  # of a generation
    save_s: float  # that a save takes
    volume: Volume = field(init=False)
    top: int = 0  # inode of its directory
    count: int = 0  # saves begun
    paused: float = 0.0  # epoch at which it stopped for a while
    kept: list[int] = field(default_factory=list)  # numbers of what it holds, oldest first
    born: dict[int, float] = field(default_factory=dict)  # number → epoch of the save
    deleted: dict[int, float] = field(default_factory=dict)  # number → epoch of the deletion

    def milestone(self, number: int) -> bool:
        return bool(self.every) and number % (self.every * self.stride) == 0

    def expired(self, keep: int) -> list[int]:
        """Return what is beyond the newest `keep`; from now on it is not among what is kept."""
        beyond = self.kept[: max(0, len(self.kept) - keep)]
        gone = [number for number in beyond if not self.milestone(number)]
        self.kept = [number for number in self.kept if number not in gone]
        self.deleted |= dict.fromkeys(gone, self.volume.now_s())
        return gone

    # Files. A directory that is not given is the job's own.

    async def directory(self, name: str, parent: int = 0) -> int:
        """Return the inode of a directory, made if need be."""
        parent = parent or self.top
        known = dict(self.volume.entries(parent)).get(name.encode())
        if known is not None:
            return known
        return (await self.volume.make(parent, name.encode(), DIRECTORY, 0, 0)).ino

    async def write(self, name: str, size: int, parent: int = 0, text: bytes = b"") -> None:
        """Write a file of so many bytes, or a text, taking its time; in place if it exists."""
        parent = parent or self.top
        known = dict(self.volume.entries(parent)).get(name.encode())
        if known is None:
            ino = (await self.volume.make(parent, name.encode(), FILE, 0, 0)).ino
        else:
            ino = (await self.volume.setattr(known, size=0)).ino
        self.volume.open(ino)
        head, end = (text, b"") if text else _ends(name, size)
        at, stop = 0, max(len(head), size - len(end))
        while at < stop:
            piece = b"".join((head, _NOISE[: min(PIECE - len(head), stop - at - len(head))]))
            await trio.sleep(self.save_s * len(piece) / self.size)
            at += await self.volume.write(ino, at, piece)
            head = b""
        await self.volume.write(ino, at, end)
        await self.volume.flush(ino)
        self.volume.close(ino)

    async def rename(self, old: str, new: str, parent: int = 0, to: int = 0) -> None:
        parent = parent or self.top
        await self.volume.rename(parent, old.encode(), to or parent, new.encode())

    async def link(self, name: str, target: str) -> None:
        """Let a symbolic link point at a target, whatever it did before."""
        if name.encode() in dict(self.volume.entries(self.top)):
            await self.remove(name)
        await self.volume.make(self.top, name.encode(), LINK, 0, 0, target=target.encode())

    async def remove(self, name: str, parent: int = 0) -> None:
        """Remove a file, or a tree in the order of readdir."""
        parent = parent or self.top
        inode = self.volume.lookup(parent, name.encode())
        if not inode.is_dir:
            await self.volume.unlink(parent, name.encode())
            return
        for below, _ in self.volume.entries(inode.ino):
            await self.remove(below.decode(), inode.ino)
        await self.volume.rmdir(parent, name.encode())

    async def rotate(self, name: str) -> None:
        """Remove all but the newest K; `name` has a place for the number."""
        for old in self.expired(self.keep):
            await self.remove(name.format(old))


def _ends(name: str, size: int) -> tuple[bytes, bytes]:
    """Return the head and the end that a whole file of this kind has."""
    if name.endswith((".pt", ".pth", ".ckpt")):
        return b"PK\3\4".ljust(64, b"\0"), _ZIP_END + (size - 22).to_bytes(4, "little") + b"\0\0"
    if name.endswith(".safetensors"):
        header = json.dumps({"w": {"data_offsets": [0, size - 72]}}).ljust(64).encode()
        return len(header).to_bytes(8, "little") + header, b""
    return b"x", b""


async def torchtitan(job: Job, number: int) -> None:
    await _distributed(job, f"step-{number}")
    job.kept.append(number)
    await job.rotate("step-{}")


async def torchtitan_async(job: Job, number: int) -> None:
    """The oldest go when the save is handed over, before there is anything of it."""
    await job.rotate("step-{}")
    await _distributed(job, f"step-{number}")
    job.kept.append(number)


async def _distributed(job: Job, name: str) -> int:
    """PyTorch's distributed checkpoint, of two ranks."""
    step = await job.directory(name)
    for rank in range(2):
        await job.write(f"__{rank}_0.distcp", job.size // 2, step)
    await job.write(".metadata.tmp", SMALL, step)
    await job.rename(".metadata.tmp", ".metadata", step)
    return step


async def megatron(job: Job, number: int) -> None:
    """The tracker says that the new one counts, then the one before goes."""
    step = await _distributed(job, f"iter_{number:07d}")
    await job.write("common.pt", SMALL, step)
    await job.write("metadata.json", SMALL, step)
    await job.write("latest_checkpointed_iteration.txt", 0, text=b"%d" % number)
    job.kept.append(number)
    await job.rotate("iter_{:07d}")


async def huggingface(job: Job, number: int) -> None:
    step = await job.directory(f"checkpoint-{number}")
    await job.write("model.safetensors", job.size // 3, step)
    await job.write("optimizer.pt", job.size - job.size // 3, step)
    await job.write("rng_state.pth", SMALL, step)
    await job.write("trainer_state.json", SMALL, step)
    job.kept.append(number)
    await job.rotate("checkpoint-{}")


async def accelerate(job: Job, number: int) -> None:
    """Deletes before it saves; nothing says that the save is complete."""
    parent = await job.directory("checkpoints")
    for old in job.expired(job.keep - 1):
        await job.remove(f"checkpoint_{old}", parent)
    step = await job.directory(f"checkpoint_{number}", parent)
    await job.write("model.safetensors", job.size // 3, step)
    await job.write("optimizer.bin", job.size - job.size // 3, step)
    await job.write("random_states_0.pkl", SMALL, step)
    job.kept.append(number)


async def lightning(job: Job, number: int) -> None:
    """`last.ckpt` is a second copy, written in place."""
    name = f"epoch={{}}-step={number}.ckpt"
    epoch = number // (10 * job.stride)
    await job.write(name.format(epoch), job.size)
    await job.write("last.ckpt", job.size)
    job.kept.append(number)
    for old in job.expired(job.keep):
        await job.remove(f"epoch={old // (10 * job.stride)}-step={old}.ckpt")


async def nemo(job: Job, number: int) -> None:
    """A file beside each directory says that it is being saved, or deleted."""
    name = "model--epoch=0-step={}"
    await job.write(f"{name.format(number)}-unfinished", 1)
    step = await job.directory(name.format(number))
    weights = await job.directory("weights", step)
    for rank in range(2):
        await job.write(f"__{rank}_0.distcp", job.size // 2, weights)
    await job.write("common.pt", SMALL, weights)
    await job.write("metadata.json", SMALL, weights)
    context = await job.directory("context", step)
    await job.write("model.yaml", SMALL, context)
    await job.remove(f"{name.format(number)}-unfinished")
    job.kept.append(number)
    for old in job.expired(job.keep):
        await job.write(f"{name.format(old)}-unfinished", 1)
        await job.remove(name.format(old))
        await job.remove(f"{name.format(old)}-unfinished")


async def deepspeed(job: Job, number: int) -> None:
    step = await job.directory(f"global_step{number}")
    await job.write("mp_rank_00_model_states.pt", job.size // 4, step)
    states = job.size - job.size // 4
    for rank in range(2):
        await job.write(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", states // 2, step)
    await job.write("latest", 0, text=b"global_step%d" % number)
    job.kept.append(number)
    await job.rotate("global_step{}")


async def orbax(job: Job, number: int) -> None:
    """Chooses what goes when it begins to save, and deletes it after the commit."""
    temporary = f"{number}.orbax-checkpoint-tmp"
    step = await job.directory(temporary)
    array = await job.directory("d", step)
    await job.write("a1b2c3", job.size, array)
    await job.write("_METADATA", SMALL, step)
    await job.write("commit_success.txt", 8, step)
    await job.rename(temporary, str(number))
    job.kept.append(number)
    await job.rotate("{}")


async def composer(job: Job, number: int) -> None:
    name = f"ep0-ba{number}-rank0.pt"
    await job.write(name, job.size)
    await job.link("latest-rank0.pt", name)
    job.kept.append(number)
    await job.rotate("ep0-ba{}-rank0.pt")


async def tensorflow(job: Job, number: int) -> None:
    """The files come out of a temporary directory; a text file names the newest."""
    name, temporary = f"ckpt-{number}", f"ckpt-{number}_temp"
    inside = await job.directory(temporary)
    data = ".data-00000-of-00001"
    await job.write(f"part-00000-of-00001{data}", job.size, inside)
    await job.write("part-00000-of-00001.index", SMALL, inside)
    await job.rename(f"part-00000-of-00001{data}", name + data, inside, job.top)
    await job.rename("part-00000-of-00001.index", name + ".index", inside, job.top)
    await job.remove(temporary)
    await job.write("checkpoint", 0, text=b'model_checkpoint_path: "%s"\n' % name.encode())
    job.kept.append(number)
    for old in job.expired(job.keep):
        await job.remove(f"ckpt-{old}{data}")
        await job.remove(f"ckpt-{old}.index")


async def torch_save(job: Job, number: int) -> None:
    """Two files a save."""
    await job.write(f"model_{number}.pt", job.size // 3)
    await job.write(f"optim_{number}.pt", job.size - job.size // 3)
    job.kept.append(number)
    for old in job.expired(job.keep):
        await job.remove(f"model_{old}.pt")
        await job.remove(f"optim_{old}.pt")


async def unknown_files(job: Job, number: int) -> None:
    await job.write(f"zork_{number}.dat", job.size)
    job.kept.append(number)
    await job.rotate("zork_{}.dat")


async def unknown_directories(job: Job, number: int) -> None:
    step = await job.directory(f"zork_{number}")
    await job.write("weights", job.size // 3, step)
    await job.write("state", job.size - job.size // 3, step)
    job.kept.append(number)
    await job.rotate("zork_{}")


class Framework(NamedTuple):
    save: Callable[[Job, int], Awaitable[None]]
    stride: int  # training steps between saves
    keeps: tuple[int, ...] = (2, 4, 5, 7)  # of the jobs
    milestones: tuple[int, ...] = ()  # of the jobs: every so many saves
    extra: int = 0  # generations' worth of bytes that a job holds beside them
    lag: int = 0  # saves later than `keep` that a generation is deleted


FRAMEWORKS = {
    "torchtitan": Framework(torchtitan, 500),
    "torchtitan-async": Framework(torchtitan_async, 500, lag=1),
    "megatron": Framework(megatron, 1000, (1, 1, 1, 1), (5, 6, 8, 10)),
    "huggingface": Framework(huggingface, 500),
    "accelerate": Framework(accelerate, 1),
    "lightning": Framework(lightning, 100, extra=1),
    "nemo": Framework(nemo, 100),
    "deepspeed": Framework(deepspeed, 100),
    "orbax": Framework(orbax, 1000, milestones=(10, 10, 10, 10)),
    "composer": Framework(composer, 250),
    "tensorflow": Framework(tensorflow, 1),
    "torch.save": Framework(torch_save, 1000),
    "unknown files": Framework(unknown_files, 1),
    "unknown directories": Framework(unknown_directories, 50),
}

ATTRIBUTES = {
    "declared": ("keep_last", "cadence", "keep_every"),
    "attributes": ("keep_last",),
    "none": (),
}
"""What a job's directory says of itself, by the kind of knowledge."""


async def enter(job: Job, volume: Volume, knows: str) -> None:
    """The job finds its directory on a volume that was just mounted, or makes it."""
    job.volume = volume
    if job.top:
        return
    job.top = await job.directory(job.name, ROOT)
    values = {"keep_last": job.keep, "cadence": job.cadence_s, "keep_every": job.every * job.stride}
    for attribute in ATTRIBUTES[knows]:
        if values[attribute]:
            name = b"user.retainz." + attribute.encode()
            await volume.setxattr(job.top, name, b"%g" % values[attribute])
