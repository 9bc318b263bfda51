"""A state machine draws programs; a dictionary says what they make; power cuts may not change it.

The rules only write a program down, as the dictionary allows it. At the end it runs on a watched
volume, the tree is compared to the dictionary, and moments of the run are cut and checked. More:
pytest --hypothesis-profile nightly tests/test_simulation_machine.py
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from retainzfs.volume import RENAME_EXCHANGE, ROOT, Volume
from tests.helpers import DIRECTORY, FILE, UUID, tree
from tests.simulation import GEOMETRY, Simulated, Sweep, deterministic, options
from tests.witness import WatchedDevice, WatchedVolume, Witness

pytestmark = pytest.mark.volume

MOMENTS = 8  # cuts a program
SIZES = [1, 255, 257, 4095, 4096, 4097, 9000, 66_000]
DIRS = (b"", b"/run", b"/other")
NAMES = (b"a", b"b", b"step-1.bin", b"step-2.bin", b"latest")

paths = st.builds(lambda d, n: d + b"/" + n, st.sampled_from(DIRS), st.sampled_from(NAMES))
places = st.sampled_from([0, 0, 1, 4095, 4096, 8192, 30_000])
data = st.builds(
    lambda size, seed: random.Random(seed).randbytes(size),
    st.sampled_from(SIZES),
    st.integers(0, 1000),
)
Command = Callable[[Volume], Awaitable[None]]


async def find(volume: Volume, path: bytes) -> tuple[int, bytes]:
    *above, name = path.strip(b"/").split(b"/")
    ino = ROOT
    for part in above:
        ino = volume.lookup(ino, part).ino
    return ino, name


async def ino_of(volume: Volume, path: bytes) -> int:
    return volume.lookup(*await find(volume, path)).ino


class Programs(RuleBasedStateMachine):
    """`files` maps paths to the content that they share with their other links."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[bytes, list[bytes]] = {}  # a list of one: links share it
        self.program: list[Command] = []
        self.parts: list[list[Command]] = [self.program]  # a mount each

    def existing(self, draw: int) -> bytes:
        return sorted(self.files)[draw % len(self.files)]

    @initialize(reap=st.booleans())
    def begin(self, reap: bool) -> None:
        async def run(volume: Volume) -> None:
            made = await volume.make(ROOT, b"run", DIRECTORY, 0, 0)
            await volume.setxattr(made.ino, b"user.retainz.keep_last", b"3" if reap else b"1")
            await volume.make(ROOT, b"other", DIRECTORY, 0, 0)

        self.program.append(run)

    @rule(path=paths, at=places, data=data, sync=st.booleans())
    def write(self, path: bytes, at: int, data: bytes, sync: bool) -> None:
        content = self.files.setdefault(path, [b""])
        old = content[0].ljust(at, b"\0")
        content[0] = old[:at] + data + old[at + len(data) :]

        async def run(volume: Volume) -> None:
            parent, name = await find(volume, path)
            ino = dict(volume.entries(parent)).get(name)
            if ino is None:
                ino = (await volume.make(parent, name, FILE, 0, 0)).ino
            volume.open(ino)
            await volume.write(ino, at, data)
            if sync:
                await volume.fsync(ino)
            await volume.flush(ino)
            volume.close(ino)

        self.program.append(run)

    @precondition(lambda self: self.files)
    @rule(draw=st.integers(0, 50), size=st.sampled_from([0, 1, 256, 4096, 5000, 40_000]))
    def truncate(self, draw: int, size: int) -> None:
        path = self.existing(draw)
        content = self.files[path]
        content[0] = content[0][:size].ljust(size, b"\0")

        async def run(volume: Volume) -> None:
            await volume.setattr(await ino_of(volume, path), size=size)

        self.program.append(run)

    @precondition(lambda self: self.files)
    @rule(draw=st.integers(0, 50), to=paths)
    def rename(self, draw: int, to: bytes) -> None:
        path = self.existing(draw)
        if self.files.get(to) is not self.files[path]:
            self.files[to] = self.files.pop(path)

        async def run(volume: Volume) -> None:
            await volume.rename(*await find(volume, path), *await find(volume, to))

        self.program.append(run)

    @precondition(lambda self: len(self.files) > 1)
    @rule(one=st.integers(0, 50), other=st.integers(0, 50))
    def exchange(self, one: int, other: int) -> None:
        path, target = self.existing(one), self.existing(other)
        self.files[path], self.files[target] = self.files[target], self.files[path]

        async def run(volume: Volume) -> None:
            source, there = await find(volume, path), await find(volume, target)
            await volume.rename(*source, *there, RENAME_EXCHANGE)

        self.program.append(run)

    @precondition(lambda self: self.files)
    @rule(draw=st.integers(0, 50), to=paths)
    def link(self, draw: int, to: bytes) -> None:
        path = self.existing(draw)
        if to in self.files:
            return
        self.files[to] = self.files[path]

        async def run(volume: Volume) -> None:
            await volume.link(await ino_of(volume, path), *await find(volume, to))

        self.program.append(run)

    @precondition(lambda self: self.files)
    @rule(draw=st.integers(0, 50))
    def unlink(self, draw: int) -> None:
        path = self.existing(draw)
        del self.files[path]

        async def run(volume: Volume) -> None:
            await volume.unlink(*await find(volume, path))

        self.program.append(run)

    @precondition(lambda self: self.files)
    @rule(draw=st.integers(0, 50))
    def fsync(self, draw: int) -> None:
        path = self.existing(draw)

        async def run(volume: Volume) -> None:
            await volume.fsync(await ino_of(volume, path))

        self.program.append(run)

    @precondition(lambda self: self.files)
    @rule(draw=st.integers(0, 50), value=st.binary(max_size=300))
    def attribute(self, draw: int, value: bytes) -> None:
        path = self.existing(draw)

        async def run(volume: Volume) -> None:
            await volume.setxattr(await ino_of(volume, path), b"user.mine", value)

        self.program.append(run)

    @rule(seconds=st.sampled_from([0.5, 2.0, 7.0]))
    def wait(self, seconds: float) -> None:
        async def run(_: Volume) -> None:
            await trio.sleep(seconds)

        self.program.append(run)

    @rule()
    def sync(self) -> None:
        async def run(volume: Volume) -> None:
            await volume.syncfs()

        self.program.append(run)

    @rule()
    def collect(self) -> None:
        async def run(volume: Volume) -> None:
            await volume.collect()

        self.program.append(run)

    @rule()
    def remount(self) -> None:
        self.program = []
        self.parts.append(self.program)

    def teardown(self) -> None:
        device = WatchedDevice(GEOMETRY)
        device.witness = witness = Witness(device)
        formatted = deterministic(0, self.run, device)
        rng = random.Random(device.operations)
        drawn = rng.choices(range(device.operations + 1), k=MOMENTS)
        sweep = Sweep(Simulated(0, device, witness, formatted), drawn).run()
        assert not sweep.violations, "\n".join(sweep.violations)

    async def run(self, device: WatchedDevice) -> int:
        await device.start()
        await Volume.format(device, uuid=UUID, now_ns=1)
        formatted = device.operations
        for part in self.parts:
            async with WatchedVolume.mounted(device, options()) as volume:
                for command in part:
                    await command(volume)
        async with Volume.mounted(device, options()) as volume:
            found = {path: c for path, c in (await tree(volume)).items() if c is not None}
        assert found == {path: content[0] for path, content in self.files.items()}
        return formatted


EXAMPLES = {"nightly": 3000}  # by hypothesis profile
TestPrograms = Programs.TestCase
TestPrograms.settings = settings(
    max_examples=EXAMPLES.get(settings.get_current_profile_name(), 40),
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
