"""Anything that a program may do to names, files and attributes of streams, at random: what is kept
of generations agrees with the namespace, and nothing is reaped that has not its successors."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest

from retainzfs import errors, fsck, layout, lifetimes
from retainzfs.lifetimes import FileClass
from retainzfs.streams import State
from retainzfs.volume import RENAME_EXCHANGE, RENAME_NOREPLACE, ROOT, Inode, Options, Volume
from tests.helpers import DIRECTORY, FILE, Clock, formatted, mounted, options, small_device
from tests.quiescence import check_quiescent
from tests.test_retention import archive
from tests.test_retention_cases import settled
from tests.witness import WatchedDevice

pytestmark = [pytest.mark.volume]

STEPS = 120
NUMBERS = (0, 1, 2, 3, 9, 10, 100)
DIRECTORIES = (
    b"step-%d",
    b"checkpoint-%d",
    b"tmp-checkpoint-%d",
    b"iter_%07d",
    b"global_step%d",
    b"a-step=%d",
    b"%d",
    b"%d.orbax-checkpoint-tmp",
    b"run_%d",
    b"step-%d.tmp",
)
FILES = (
    b"model-%d.pt",
    b"optim-%d.pt",
    b"model-%d.pt.tmp",
    b"step-%d-rank0.pt",
    b"step-%d-rank1.pt",
    b"epoch=%d-v1.ckpt",
    b"a-step=%d-unfinished",
    b"model-%d.index",
    b"model-%d.data-0-of-1",
    b"shard%d.dat",
    b"%d",
)
INSIDE = (
    b".metadata",
    b"trainer_state.json",
    b"metadata.json",
    b"shard",
    b"commit_success.txt",
    b"log.txt",
)
OUTSIDE = (b"latest", b"latest_checkpointed_iteration.txt", b"last.ckpt", b"notes", b"checkpoint")
PLACES = (b"run", b"other", b"deep")
ATTRIBUTES: dict[bytes, tuple[bytes, ...]] = {
    b"keep_last": (b"1", b"2", b"3"),
    b"reap": (b"0", b"1", b"1"),
    b"keep_every": (b"3", b"100"),
    b"anchor": (b"0", b"1"),
    b"cadence": (b"10s", b"1h"),
    b"retire": (b"50", b"inf"),
    b"birth": (b"5", b"1e6"),
    b"size": (b"1M",),
}
Table = dict[tuple[str, int, float], str]


class Fuzz:
    def __init__(self, rng: random.Random, clock: Clock, *, links: bool = False) -> None:
        self.rng = rng
        self.clock = clock
        self.links = links
        self.volume: Volume
        self.held: list[int] = []
        self.reaped = 0

    # What is there

    def inodes(self) -> list[tuple[int, bytes, Inode]]:
        """Return (directory, name, inode) of all names."""
        found = []
        waiting = [ROOT]
        while waiting:
            directory = waiting.pop()
            for name, ino in self.volume.entries(directory):
                inode = self.volume.inode(ino)
                found.append((directory, name, inode))
                if inode.is_dir:
                    waiting.append(ino)
        return found

    def directory(self) -> int:
        directories = [inode.ino for *_, inode in self.inodes() if inode.is_dir]
        return self.rng.choice([ROOT, *directories])

    def name(self) -> bytes:
        kind = self.rng.choice((DIRECTORIES, FILES, FILES, INSIDE, OUTSIDE, PLACES))
        name = self.rng.choice(kind)
        return name % self.rng.choice(NUMBERS) if b"%" in name else name

    def any(self) -> tuple[int, bytes, Inode] | None:
        found = self.inodes()
        return self.rng.choice(found) if found else None

    # What happens

    async def save(self) -> None:
        """A directory with files, the marker last perhaps."""
        parent = self.directory()
        name = self.rng.choice(DIRECTORIES) % self.rng.choice(NUMBERS)
        top = (self.volume.namespace.directory(parent)).get(name)
        if top is None:
            top = (await self.volume.make(parent, name, DIRECTORY, 0, 0)).ino
        for inside in self.rng.sample(INSIDE, self.rng.randint(1, 3)):
            await self.write(top, inside)

    async def train(self) -> None:
        """As the Hugging Face trainer saves."""
        name = b"checkpoint-%d" % self.rng.choice(NUMBERS)
        parent = self.rng.choice([ROOT, *[i.ino for *_, i in self.inodes() if i.is_dir][:2]])
        entries = self.volume.namespace.directory(parent)
        if name in entries and self.volume.inode(entries[name]).is_dir:
            await self._remove(parent, name, self.volume.inode(entries[name]))
        top = await self.volume.make(parent, name, DIRECTORY, 0, 0)
        for inside in (b"shard", b"trainer_state.json"):
            await self.write(top.ino, inside)

    async def file(self) -> None:
        await self.write(self.directory(), self.name())

    async def write(self, parent: int, name: bytes) -> None:
        ino = self.volume.namespace.directory(parent).get(name)
        if ino is None:
            ino = (await self.volume.make(parent, name, FILE, 0, 0)).ino
        inode = self.volume.inode(ino)
        if not inode.is_file:
            return
        self.volume.open(ino)
        if self.rng.random() < 0.3:
            await self.volume.setattr(ino, size=self.rng.choice((0, 100, 70_000)))
        data = self.rng.choice((archive(100), archive()[:-10], b"x" * 5000, b"step-2\n", b"3"))
        if name == b"trainer_state.json":
            data = b'{"best_model_checkpoint": "/a/checkpoint-%d"}' % self.rng.choice(NUMBERS)
        await self.volume.write(ino, 0, data)
        if self.rng.random() < 0.1:
            self.held.append(ino)
            return
        died = self.rng.random() < 0.1
        await self.volume.flush(ino, died=lambda: died)
        self.volume.close(ino)

    async def release(self) -> None:
        if self.held:
            ino = self.held.pop(self.rng.randrange(len(self.held)))
            await self.volume.flush(ino)
            self.volume.close(ino)

    async def move(self) -> None:
        picked = self.any()
        if picked is not None:
            parent, name, _ = picked
            flags = self.rng.choice((0, 0, 0, RENAME_EXCHANGE, RENAME_NOREPLACE))
            to = self.directory(), self.name()
            other = self.any()
            if picked[2].is_dir and not flags:
                to = to[0], self.rng.choice(DIRECTORIES) % self.rng.choice(NUMBERS)
            elif (
                self.rng.random() < 0.4
                and other is not None
                and other[2].is_dir == picked[2].is_dir
            ):
                to = other[:2]
            elif flags == RENAME_EXCHANGE:
                return
            elif self.rng.random() < 0.4:
                to = parent, lifetimes.layouts.without_temporary(name)[0]
            await self.volume.rename(parent, name, *to, flags)

    async def link(self) -> None:
        picked = self.any()
        if self.links and picked is not None and picked[2].is_file:
            await self.volume.link(picked[2].ino, self.directory(), self.name())

    async def symlink(self) -> None:
        picked = self.any()
        if picked is not None:
            target = self.volume.path(picked[2].ino).encode()
            target = self.rng.choice((b"/mnt" + target, picked[1], b"../" + picked[1]))
            mode = 0o120777
            await self.volume.make(self.directory(), self.name(), mode, 0, 0, target=target)

    async def unlink(self) -> None:
        picked = self.any()
        if picked is not None and not picked[2].is_dir:
            await self.volume.unlink(*picked[:2])

    async def remove(self) -> None:
        """As `rm -r`, cut short now and then."""
        picked = self.any()
        if picked is None or not picked[2].is_dir:
            return
        await self._remove(*picked)

    async def _remove(self, parent: int, name: bytes, inode: Inode) -> None:
        for below, ino in self.volume.entries(inode.ino):
            if self.rng.random() < 0.05:
                return
            child = self.volume.inode(ino)
            if child.is_dir:
                await self._remove(inode.ino, below, child)
            else:
                await self.volume.unlink(inode.ino, below)
        await self.volume.rmdir(parent, name)

    async def attribute(self) -> None:
        picked = self.any()
        ino = ROOT if picked is None or self.rng.random() < 0.3 else picked[2].ino
        name = self.rng.choice(sorted(ATTRIBUTES))
        key = b"user.retainz." + name
        if self.rng.random() < 0.3 and key in (self.volume.inode(ino).xattrs or {}):
            await self.volume.removexattr(ino, key)
        else:
            await self.volume.setxattr(ino, key, self.rng.choice(ATTRIBUTES[name]))

    async def commit(self) -> None:
        picked = self.any()
        if picked is not None:
            await self.volume.setxattr(picked[2].ino, b"user.retainz.commit", b"1")

    async def wait(self) -> None:
        self.clock.time_s += self.rng.choice((1, 10, 100))

    async def step(self) -> None:
        acts = (
            *(self.save,) * 3,
            *(self.train,) * 6,
            *(self.file,) * 6,
            *(self.move,) * 4,
            self.release,
            self.link,
            self.symlink,
            self.unlink,
            self.remove,
            self.attribute,
            self.attribute,
            self.commit,
            self.wait,
            self.wait,
        )
        with contextlib.suppress(errors.FSError, errors.NoSpace, errors.BadAttribute):
            await self.rng.choice(acts)()

    # What must be true

    def watch(self, volume: Volume) -> None:
        """Look at whatever is reaped, before that."""
        retention, reap = volume.retention, volume._reap_one

        async def reap_one(retired: int, names: list[tuple[int, bytes]]) -> None:
            record = retention.namespace.generations[retired]
            keep = retention.policy_of(retention.namespace.get(record.stream)).keep_last
            assert keep is not None
            newer = [r for r in self.whole(record.stream, retired) if r.order > record.order]
            assert len(newer) >= keep, f"{record} is reaped, and is one of the newest"
            for ino in retention.members[retired]:
                inode = volume.inode(ino)
                assert (inode.xattrs or {}).get(b"user.retainz.anchor") != b"1"
            self.reaped += 1
            await reap(retired, names)

        volume._reap_one = reap_one  # type: ignore[method-assign]

    def whole(self, stream: int, generation: int) -> list[layout.GenerationRecord]:
        """Return what the stream of a generation can be loaded from."""
        retention = self.volume.retention
        records = retention.records(retention._of[generation])
        found = []
        for record in records:
            members = [self.volume.inode(i) for i in retention.members[record.generation]]
            dirty = self.volume.committer.dirty
            durable = all(inode.handles or inode.ino not in dirty for inode in members)
            sound = not any(inode.doubt for inode in members)
            counts = record.state in (State.COMPLETE, State.PRESUMED)
            if counts and durable and sound and retention.names_of(record.generation):
                found.append(record)
        return found

    def check(self) -> None:
        retention = self.volume.retention
        known = retention.namespace.generations
        for inode in retention.namespace.inodes.values():
            if not inode.is_file or not inode.nlink:
                continue
            of = retention.generations_of(inode)
            assert not inode.generation or inode.generation in of
            for generation in of:
                assert generation in retention.members
                assert inode.ino in retention.members[generation]
        for generation, members in retention.members.items():
            assert members, f"generation {generation} is empty"
            for ino in members:
                assert generation in retention.generations_of(self.volume.inode(ino))
        numbered = {}
        for stream in retention.all_streams():
            for number, generation in stream.numbers.items():
                record = known[generation]
                assert (record.number, record.stream) == (number, stream.ino)
                assert retention._of[generation] is stream
                assert generation not in numbered
                numbered[generation] = stream
        for generation, record in known.items():
            live = record.state != State.RETIRED
            assert (generation in numbered) == live, f"{record} is of no stream"
            assert generation in retention.members
        for parent, name, inode in self.inodes():
            self.check_name(parent, name, inode)

    def check_name(self, parent: int, name: bytes, inode: Inode) -> None:
        retention = self.volume.retention
        told = self.volume.explain(inode.ino)
        if not inode.is_file or retention.owns(inode):
            return
        generation = retention.known(parent, name)
        of = retention.generations_of(inode)
        # What names mean that no layout has depends on what was known when the file came.
        path = [*self.volume.namespace.components(parent), name]
        usual = lifetimes.recognise(path) is not None
        usual &= retention.context(parent, name).policy.file_class is FileClass.CHECKPOINT
        assert generation in of or not generation or not usual, path
        record = retention.record_of(inode)
        assert told["generation"] == (None if record is None else record.number)

    def table(self) -> Table:
        """Return what a remount must find: (path, number, birth) → state."""
        return {
            (row["path"], row["number"], row["birth_epoch"]): row["state"].replace(
                "retired", "complete"
            )
            for row in self.volume.generations(ROOT)
        }


def told(volume: Volume) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(volume.getxattr(ROOT, b"user.retainz.history"))
    return rows


async def go(fuzz: Fuzz, device: WatchedDevice, mount: Options, steps: int) -> None:
    before: Table | None = None
    for _ in range(3):
        async with mounted(device, mount) as fuzz.volume:
            fuzz.watch(fuzz.volume)
            if before is None and fuzz.rng.random() < 0.7:
                keep = fuzz.rng.choice((b"1", b"2"))
                await fuzz.volume.setxattr(ROOT, b"user.retainz.keep_last", keep)
                await fuzz.volume.setxattr(ROOT, b"user.retainz.reap", b"1")
            await settled(fuzz.volume)
            fuzz.check()
            if before is not None:
                after = fuzz.table()
                assert after.keys() == before.keys()
                for key, state in before.items():
                    assert state == "writing" or after[key] == state
            for number in range(steps):
                await fuzz.step()
                if number % 3 == 0:
                    await settled(fuzz.volume)
                    fuzz.check()
                    told(fuzz.volume)
                if number % 20 == 0:
                    await check_quiescent(fuzz.volume)
            while fuzz.held:
                await fuzz.release()
            await settled(fuzz.volume)
            await check_quiescent(fuzz.volume)
            fuzz.check()
            before = fuzz.table()
    report = await fsck.examine(device, scrub=True)
    assert not report.findings, report.findings


@pytest.mark.power_cuts(3)
@pytest.mark.parametrize("seed", range(6))
async def test_what_is_kept_agrees_with_the_names(seed: int) -> None:
    clock = Clock()
    fuzz = Fuzz(random.Random(seed), clock)
    await go(fuzz, await formatted(small_device(zones=96)), options(clock), STEPS // 3)


@pytest.mark.parametrize("seed", [5, 7, 28, 38, 58, 2014])
async def test_links_and_all(seed: int) -> None:
    """Without power cuts: who watches these takes a file to be in one generation."""
    clock = Clock()
    fuzz = Fuzz(random.Random(seed), clock, links=True)
    await go(fuzz, await formatted(small_device(zones=96)), options(clock), STEPS // 3)
