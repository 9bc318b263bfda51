"""The emulated device on its medium: crashes, damage, space, and what the host gets wrong."""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from retainzfs.device import BLOCK, Condition, create_target, open_target
from retainzfs.device.aio import AsyncEngine, Ticket
from retainzfs.device.disk import set_direct
from retainzfs.device.emulated import EmulatedDevice
from retainzfs.device.head import ALIGNMENT, STATES
from retainzfs.errors import ChecksumError, Damaged, DeviceError, ForeignTarget
from tests.device_backends import (
    GEOMETRY,
    HEADER,
    IMAGE_SIZE,
    KIB,
    MIB,
    bytes_of,
    file_size_limit,
    flip,
    formatted,
    pointers,
    random_blocks,
    started,
    used,
)

pytestmark = pytest.mark.volume

ZONE = GEOMETRY.zone_size
BLOCKS = ZONE // BLOCK
PAGE_0 = 2 * BLOCK  # copy 0 and 1 of the only state page
PAGE_1 = 3 * BLOCK


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A formatted image that is not open."""
    path = tmp_path / "image"
    formatted(path).close()
    return path


@pytest.fixture
async def device(image: Path) -> AsyncIterator[EmulatedDevice]:
    async with started(image) as device:
        yield device


# --- crashes ------------------------------------------------------------------------------------


async def test_what_was_not_flushed_does_not_exist(device: EmulatedDevice, image: Path) -> None:
    await device.append(0, 0, random_blocks(1))
    await device.flush()
    await device.append(0, BLOCK, random_blocks(1))
    await device.append(1, 0, random_blocks(1))
    await device.finish(2)
    crashed = image.with_name("crashed")
    shutil.copyfile(image, crashed)
    assert pointers(crashed)[:3] == [BLOCK, 0, 0]
    await device.flush()
    shutil.copyfile(image, crashed)
    assert pointers(crashed)[:3] == [2 * BLOCK, BLOCK, ZONE]


async def test_a_flush_writes_the_older_copy(device: EmulatedDevice, image: Path) -> None:
    for expected in ([1, 2], [3, 2], [3, 4]):
        data = random_blocks(1)
        await device.append(0, device.report()[0].write_pointer, data)
        await device.flush()
        found = bytes_of(image)[PAGE_0 : PAGE_1 + BLOCK]
        assert [int.from_bytes(found[at : at + 8], "little") for at in (0, BLOCK)] == expected


async def test_a_torn_state_page_costs_only_its_flush(device: EmulatedDevice, image: Path) -> None:
    """Whatever sectors of the page got there: the zones are as before or after, all of them."""
    await device.append(0, 0, random_blocks(1))
    await device.flush()
    before = bytes_of(image)
    await device.append(0, BLOCK, random_blocks(1))
    await device.append(1, 0, random_blocks(1))
    await device.flush()
    after = bytes_of(image)
    crashed = image.with_name("crashed")
    outcomes = set()
    for landed in range(256):
        torn = bytearray(after)
        for sector in range(8):
            at = PAGE_0 + 512 * sector
            if not landed >> sector & 1:
                torn[at : at + 512] = before[at : at + 512]
        crashed.write_bytes(torn)
        outcomes.add(tuple(pointers(crashed)[:2]))
    assert outcomes == {(BLOCK, 0), (2 * BLOCK, BLOCK)}


async def test_both_copies_of_a_page_bad(device: EmulatedDevice, image: Path) -> None:
    await device.append(0, 0, random_blocks(1))
    await device.flush()
    await device.aclose()
    flip(image, PAGE_0 + 40)
    assert pointers(image)[0] == BLOCK
    flip(image, PAGE_1 + 4095)
    before = bytes_of(image)
    with pytest.raises(Damaged, match="both copies of the state of zones 0 to 15: checksum"):
        open_target(str(image))
    assert bytes_of(image) == before


async def test_many_state_pages(tmp_path: Path) -> None:
    path = tmp_path / "image"
    create_target(str(path), size=150 * MIB, zone_size=256 * KIB).close()
    async with started(path) as device:
        count = device.geometry.zone_count
        assert count == 596
        touched = [0, STATES - 1, STATES, 2 * STATES, count - 1]
        data = {zone: random_blocks(1) for zone in touched}
        for zone in touched:
            await device.append(zone, 0, data[zone])
        await device.flush()
    async with started(path) as device:
        assert [zone.index for zone in device.report() if zone.write_pointer] == touched
        for zone in touched:
            assert bytes(await device.read(zone, 0, BLOCK)) == bytes(data[zone])
    # The newest copy of the second page: its last flush is lost, the other pages keep theirs.
    flip(path, (2 + 3 + 1) * BLOCK)
    assert [zone for zone, at in enumerate(pointers(path)) if at] == [0, 252, 506, 595]
    flip(path, (2 + 1) * BLOCK)
    with pytest.raises(Damaged, match="zones 253 to 505"):
        open_target(str(path))


@settings(max_examples=150, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 4 * BLOCK - 1), st.integers(0, 7)), max_size=3))
def test_flipped_bits_never_give_a_wrong_state(flips: list[tuple[int, int]]) -> None:
    async def prepare(path: Path) -> None:
        formatted(path).close()
        async with started(path) as device:
            for _ in range(2):
                await device.append(3, device.report()[3].write_pointer, random_blocks(1))
                await device.flush()

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "image"
        trio.run(prepare, path)
        for offset, bit in flips:
            flip(path, offset, bit)
        try:
            found = pointers(path)
        except (Damaged, ForeignTarget):
            assert flips
        else:
            assert found[3] in (BLOCK, 2 * BLOCK)
            assert sum(found) == found[3]


# --- space --------------------------------------------------------------------------------------


async def test_reset_gives_space_back_after_the_flush(image: Path) -> None:
    async with started(image) as device:
        for zone in range(4):
            await device.append(zone, 0, random_blocks(BLOCKS))
        await device.flush()
    full = used(image)
    assert full >= 4 * ZONE
    async with started(image) as device:
        await device.reset([0, 1, 2])
    assert used(image) == full  # a crash would bring the zones back, so their bytes must be there
    async with started(image) as device:
        await device.reset([0, 1, 2])
        await device.flush()
    assert used(image) <= full - 3 * ZONE
    assert pointers(image)[:4] == [0, 0, 0, ZONE]


async def test_space_given_back_is_never_new_data(device: EmulatedDevice) -> None:
    """Who appends while the zones are being discarded waits for that."""
    for _ in range(5):
        data = {zone: random_blocks(BLOCKS) for zone in range(GEOMETRY.max_active)}
        for zone, blocks in data.items():
            await device.append(zone, 0, blocks)
        await device.flush()
        await device.reset(list(data))
        await device.flush()

        async def rewrite(zone: int, blocks: memoryview) -> None:
            await device.ready(zone)
            await device.append(zone, 0, blocks)

        async with trio.open_nursery() as nursery:
            for zone, blocks in data.items():
                nursery.start_soon(rewrite, zone, blocks[: 2 * BLOCK])
        for zone, blocks in data.items():
            found = await device.read(zone, 0, 2 * BLOCK)
            assert bytes(found) == bytes(blocks[: 2 * BLOCK])
            await device.reset([zone])


async def test_a_zone_written_before_the_flush_is_not_discarded(device: EmulatedDevice) -> None:
    await device.append(0, 0, random_blocks(BLOCKS))
    await device.flush()
    data = random_blocks(3)
    await device.reset([0])
    await device.append(0, 0, data)
    await device.flush()
    await device.aclose()
    async with started(Path(device.name)) as again:
        assert bytes(await again.read(0, 0, 3 * BLOCK)) == bytes(data)


async def test_a_preallocated_image_keeps_its_space(tmp_path: Path) -> None:
    path = tmp_path / "image"
    formatted(path, preallocate=True).close()
    assert used(path) >= IMAGE_SIZE
    async with started(path) as device:
        await device.append(0, 0, random_blocks(BLOCKS))
        await device.flush()
        await device.reset([0])
        await device.flush()
    assert used(path) >= IMAGE_SIZE


async def test_a_host_that_cannot_discard(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refuse(_: AsyncEngine, callback: Callable[[int], None], *where: int, device: bool) -> None:
        asked.append(where)
        callback(errno.EOPNOTSUPP)

    monkeypatch.setattr(AsyncEngine, "discard", refuse)
    with caplog.at_level("INFO"):
        for _ in range(2):
            await device.append(0, 0, random_blocks(1))
            await device.reset([0])
            await device.flush()
    assert len(asked) == 1
    assert "resets return no space: Operation not supported" in caplog.text
    await device.append(0, 0, random_blocks(1))


# --- host errors --------------------------------------------------------------------------------


async def test_a_failed_append_leaves_the_pointer(device: EmulatedDevice, image: Path) -> None:
    data = random_blocks(8)
    await device.append(1, 0, data)
    before = [zone.write_pointer for zone in device.report()]
    with (
        file_size_limit(ALIGNMENT + ZONE + 12 * BLOCK),
        pytest.raises(DeviceError, match="append to zone 1: File too large") as caught,
    ):
        await device.append(1, 8 * BLOCK, data)
    assert caught.value.errno == errno.EFBIG
    assert [zone.write_pointer for zone in device.report()] == before
    await device.append(1, 8 * BLOCK, data)
    await device.flush()
    assert bytes(await device.read(1, 8 * BLOCK, 8 * BLOCK)) == bytes(data)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_appends_end_in_their_order_whoever_asks_first(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    real = AsyncEngine.append
    descriptors = iter([-1])  # the first write fails, the one behind it gets through

    def broken(engine: AsyncEngine, fd: int, *rest: Any) -> Ticket:
        return real(engine, next(descriptors, fd), *rest)

    monkeypatch.setattr(AsyncEngine, "append", broken)
    data = random_blocks(3)
    appends = [device.append(0, 0, data), device.append(0, 3 * BLOCK, data)]
    for which in order:
        with pytest.raises(DeviceError, match="append to zone 0"):
            await appends[which]
    assert device.report()[0].write_pointer == 0, "it covers what was not written"
    assert device.statistics()["appended_bytes"] == 0
    await device.append(0, 0, data)
    assert device.report()[0].write_pointer == 3 * BLOCK


async def test_a_failed_first_append_leaves_the_zone_usable(device: EmulatedDevice) -> None:
    with file_size_limit(ALIGNMENT), pytest.raises(DeviceError):
        await device.append(0, 0, random_blocks(1))
    assert device.report()[0][1:3] == (Condition.IMPLICIT_OPEN, 0)
    await device.close_zone(0)
    assert device.report()[0].condition == Condition.CLOSED


async def test_a_failed_flush_is_final(
    device: EmulatedDevice, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_blocks(1)
    await device.append(0, 0, data)
    await device.flush()
    calls = []

    async def fail(_: AsyncEngine, fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(AsyncEngine, "flush", fail)
    await device.append(0, BLOCK, data)
    with pytest.raises(DeviceError, match="flush: Input/output error"):
        await device.flush()
    monkeypatch.undo()
    for call in (
        device.flush(),
        device.append(0, 2 * BLOCK, data),
        device.reset([0]),
        device.finish(0),
    ):
        with pytest.raises(DeviceError, match="after a failed flush: Input/output error") as caught:
            await call
        assert caught.value.errno == errno.EIO
    assert len(calls) == 1
    assert bytes(await device.read(0, 0, BLOCK)) == bytes(data)


async def test_everybody_who_waits_learns_of_a_failed_flush(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: AsyncEngine, fd: int) -> None:
        await trio.testing.wait_all_tasks_blocked()
        raise OSError(errno.EIO, "")

    failures = []

    async def flush() -> None:
        with pytest.raises(DeviceError) as caught:
            await device.flush()
        failures.append(caught.value)

    monkeypatch.setattr(AsyncEngine, "flush", fail)
    await device.append(0, 0, random_blocks(1))
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(flush)
    assert len(failures) == 4


async def test_flushes_that_wait_share_one(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AsyncEngine.flush
    running = []
    first_runs, go_on = trio.Event(), trio.Event()

    async def held(engine: AsyncEngine, fd: int) -> None:
        running.append(fd)
        first_runs.set()
        await go_on.wait()
        await device.append(1 + len(running), 0, random_blocks(1))
        await real(engine, fd)

    monkeypatch.setattr(AsyncEngine, "flush", held)
    await device.append(0, 0, random_blocks(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.flush)
        await first_runs.wait()
        await device.append(1, 0, random_blocks(1))
        for _ in range(4):
            nursery.start_soon(device.flush)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert len(running) == 2
    monkeypatch.undo()
    await device.aclose()
    assert pointers(Path(device.name))[:4] == [BLOCK, BLOCK, BLOCK, 0]


async def test_a_flush_of_nothing_costs_nothing(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    await device.append(0, 0, random_blocks(1))
    await device.flush()
    monkeypatch.delattr(AsyncEngine, "flush")
    await device.read(0, 0, BLOCK)
    await device.flush()
    assert device.statistics()["flushes"] == 1


async def test_changed_bytes_are_found(device: EmulatedDevice, image: Path) -> None:
    sums = await device.append(2, 0, random_blocks(20), HEADER)
    flip(image, ALIGNMENT + 2 * ZONE + 5 * BLOCK + 77)
    with pytest.raises(ChecksumError) as caught:
        await device.read(2, 0, 20 * BLOCK, sums.blocks)
    assert caught.value.args == (str(image), 2, 5 * BLOCK)
    await device.read(2, 6 * BLOCK, 14 * BLOCK, sums.blocks[24:])


async def test_read_only(image: Path) -> None:
    async with started(image) as device:
        await device.append(0, 0, random_blocks(1))
        await device.flush()
    before = bytes_of(image)
    async with started(image, readonly=True) as device:
        assert device.report()[0].condition == Condition.CLOSED
        await device.read(0, 0, BLOCK)
        for call in (device.append(0, BLOCK, random_blocks(1)), device.reset([0]), device.flush()):
            with pytest.raises(DeviceError, match="Read-only file system") as caught:
                await call
            assert caught.value.errno == errno.EROFS
    assert bytes_of(image) == before


async def test_buffered_where_direct_io_is_refused(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = os.open("/proc/self/status", os.O_RDONLY)  # a filesystem that refuses O_DIRECT
    assert not set_direct(fd)
    os.close(fd)
    monkeypatch.setattr("retainzfs.device.emulated.set_direct", lambda fd: False)
    async with started(image) as device:
        data = random_blocks(9)
        sums = await device.append(0, 0, data)
        await device.flush()
        assert bytes(await device.read(0, 0, 9 * BLOCK, sums.blocks)) == bytes(data)
    assert pointers(image)[0] == 9 * BLOCK


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    directory = Path("/dev/shm")
    if not (directory.is_dir() and os.access(directory, os.W_OK)):
        pytest.skip("no writable tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir=directory, prefix="retainzfs-test-") as made:
        yield Path(made)


async def test_on_tmpfs(tmpfs: Path) -> None:
    path = tmpfs / "image"
    formatted(path).close()
    async with started(path) as device:
        await device.append(0, 0, random_blocks(BLOCKS))
        await device.flush()
        full = used(path)
        await device.reset([0])
        await device.flush()
    assert used(path) <= full - ZONE


def test_images_are_private(image: Path) -> None:
    assert stat.S_IMODE(image.stat().st_mode) == 0o600
