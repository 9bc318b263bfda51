"""The native module: aligned memory, CRC-32C against its published vectors, the I/O engine."""

import errno
import os
import select
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs._zio import (
    CLOSE_ZONE,
    FINISH_ZONE,
    HARDWARE_CRC,
    OPEN_ZONE,
    RESET_ZONE,
    Engine,
    Slot,
    aligned,
    crc32c,
    crc32c_blocks,
    report_zones,
)
from tests.device_backends import HEADER, file_size_limit

BLOCK = 4096


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.pure
@pytest.mark.parametrize("size", [1, 4096, 5000, 4 << 20])
def test_slot_is_aligned_zeroed_and_writable(size: int) -> None:
    slot = Slot(size)
    view = memoryview(slot)
    assert len(slot) == view.nbytes == size
    assert aligned(view)
    assert bytes(view) == bytes(size)
    view[-1] = 7
    assert memoryview(slot)[size - 1] == 7


@pytest.mark.pure
def test_slot_lives_as_long_as_a_view_of_it() -> None:
    view = memoryview(Slot(BLOCK))[10:20]
    view[:] = b"0123456789"
    others = [Slot(BLOCK) for _ in range(100)]
    assert bytes(view) == b"0123456789"
    assert len(others) == 100


@pytest.mark.pure
@pytest.mark.parametrize("size", [0, -1])
def test_slot_of_no_size(size: int) -> None:
    with pytest.raises(ValueError, match="slot of"):
        Slot(size)


@pytest.mark.pure
def test_aligned() -> None:
    view = memoryview(Slot(2 * BLOCK))
    assert aligned(view[BLOCK:])
    assert not aligned(view[1:])
    assert not aligned(view[512:])


# --- checksums ----------------------------------------------------------------------------------

# RFC 3720, B.4, and the check value of the catalogue of parametrised CRC algorithms.
ISCSI_READ = bytes.fromhex(
    "01c00000000000000000000000000000140000000000040000000014000000182800000000000000"
    "0200000000000000"
)
VECTORS = [
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (ISCSI_READ, 0xD9963A56),
    (b"", 0),
]


@pytest.mark.pure
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_crc32c_vectors(data: bytes, expected: int, portable: bool) -> None:
    assert crc32c(data, portable=portable) == expected


@pytest.mark.pure
@given(data=st.binary(max_size=300), start=st.integers(0, 20), value=st.integers(0, 2**32 - 1))
def test_crc32c_hardware_equals_portable(data: bytes, start: int, value: int) -> None:
    part = memoryview(data)[start:]  # any alignment
    assert crc32c(part, value) == crc32c(part, value, portable=True)


@pytest.mark.pure
@given(data=st.binary(max_size=300), cut=st.integers(0, 300))
def test_crc32c_continues(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


@pytest.mark.pure
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("blocks", range(9))
def test_crc32c_blocks(blocks: int, portable: bool) -> None:
    data = os.urandom(blocks * BLOCK)
    expected = [crc32c(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]
    assert crc32c_blocks(data, portable=portable) == struct.pack(f"<{blocks}I", *expected)


@pytest.mark.pure
def test_crc32c_blocks_of_a_part() -> None:
    with pytest.raises(ValueError, match="4097 bytes are not whole blocks"):
        crc32c_blocks(bytes(4097))


@pytest.mark.pure
def test_the_instruction_is_used_where_the_processor_has_it() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert ("sse4_2" in flags) == HARDWARE_CRC


# --- engine -------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(2, 2)
    yield engine
    engine.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def results(engine: Engine, count: int) -> dict[Any, tuple[int, bytes, int]]:
    """By token, after `count` requests have finished."""
    found: dict[Any, tuple[int, bytes, int]] = {}
    while len(found) < count:
        ready, _, _ = select.select([engine.fileno()], [], [], 30)
        assert ready, f"only {len(found)} of {count} requests finished"
        found |= {token: tuple(result) for token, *result in engine.completions()}
    return found


def filled(blocks: int) -> Slot:
    slot = Slot(blocks * BLOCK)
    memoryview(slot)[:] = os.urandom(blocks * BLOCK)
    return slot


@pytest.mark.volume
@pytest.mark.parametrize("blocks", [1, 17, 1016])
def test_append_writes_data_and_trailer(engine: Engine, fd: int, blocks: int) -> None:
    slot = filled(blocks)
    engine.submit_append("a", fd, BLOCK, slot, HEADER)
    error, sums, trailer_sum = results(engine, 1)["a"]
    data, trailer = os.pread(fd, 1 << 30, BLOCK)[:-BLOCK], os.pread(fd, BLOCK, (blocks + 1) * BLOCK)
    assert error == 0
    assert data == bytes(memoryview(slot))
    assert sums == crc32c_blocks(data)
    assert trailer == (HEADER + sums).ljust(BLOCK, b"\0")
    assert trailer_sum == crc32c(trailer)


@pytest.mark.volume
def test_append_without_trailer(engine: Engine, fd: int) -> None:
    engine.submit_append("a", fd, 0, filled(3))
    error, sums, trailer_sum = results(engine, 1)["a"]
    assert (error, len(sums), trailer_sum) == (0, 12, 0)
    assert os.fstat(fd).st_size == 3 * BLOCK


@pytest.mark.volume
@pytest.mark.parametrize(
    ("data", "header"),
    [(b"", b""), (bytes(100), b""), (bytes(BLOCK), b"short"), (bytes(1017 * BLOCK), HEADER)],
)
def test_append_refuses(engine: Engine, fd: int, data: bytes, header: bytes) -> None:
    with pytest.raises(ValueError, match=r"not whole blocks|a trailer for"):
        engine.submit_append("a", fd, 0, data, header)
    assert engine.pending == 0
    assert os.fstat(fd).st_size == 0


@pytest.mark.volume
@pytest.mark.parametrize("bad", [None, 0, 1, 3, 49, 99])
def test_read_verifies_every_block(engine: Engine, fd: int, bad: int | None) -> None:
    data = bytearray(os.urandom(100 * BLOCK))
    sums = crc32c_blocks(data)
    if bad is not None:
        data[bad * BLOCK + 4095] ^= 1
        data[99 * BLOCK] ^= 1
    os.pwrite(fd, data, BLOCK)
    buffer = Slot(100 * BLOCK, clear=False)
    engine.submit_read("r", fd, BLOCK, buffer, sums)
    error, found, first_bad = results(engine, 1)["r"]
    assert error == 0
    assert bytes(memoryview(buffer)) == data
    assert found == crc32c_blocks(data)
    assert first_bad == (-1 if bad is None else bad)


@pytest.mark.volume
def test_read_past_the_end(engine: Engine, fd: int) -> None:
    os.pwrite(fd, bytes(3 * BLOCK), 0)
    engine.submit_read("r", fd, 2 * BLOCK, Slot(2 * BLOCK))
    assert results(engine, 1)["r"][:2] == (errno.ENODATA, b"")


@pytest.mark.volume
def test_read_refuses(engine: Engine, fd: int) -> None:
    with pytest.raises(BufferError):
        engine.submit_read("r", fd, 0, bytes(BLOCK))
    with pytest.raises(ValueError, match="8 bytes of sums for 4096 bytes"):
        engine.submit_read("r", fd, 0, Slot(BLOCK), bytes(8))


@pytest.mark.volume
def test_errors_are_the_hosts(engine: Engine) -> None:
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    engine.submit_append("append", closed, 0, filled(1))
    engine.submit_read("read", closed, 0, Slot(BLOCK))
    engine.submit_flush("flush", closed)
    engine.submit_discard("discard", closed, 0, BLOCK)
    assert {token: result[0] for token, result in results(engine, 4).items()} == dict.fromkeys(
        ("append", "read", "flush", "discard"), errno.EBADF
    )


@pytest.mark.volume
def test_a_short_write_goes_on_until_it_fails(engine: Engine, fd: int) -> None:
    slot = filled(4)
    with file_size_limit(6000):
        engine.submit_append("a", fd, 0, slot, HEADER)
        assert results(engine, 1)["a"][0] == errno.EFBIG
    assert os.pread(fd, 1 << 20, 0) == bytes(memoryview(slot))[:6000]


@pytest.mark.volume
def test_flush_and_discard(engine: Engine, fd: int) -> None:
    os.pwrite(fd, b"x" * (1 << 20), 0)
    engine.submit_flush("f", fd)
    assert results(engine, 1)["f"] == (0, b"", 0)
    before = os.fstat(fd).st_blocks
    engine.submit_discard("d", fd, 0, 1 << 19)
    if results(engine, 1)["d"][0] == errno.EOPNOTSUPP:
        pytest.skip("no hole punching here")
    assert os.fstat(fd).st_blocks <= before // 2
    assert os.fstat(fd).st_size == 1 << 20
    assert os.pread(fd, 1 << 20, 0) == bytes(1 << 19) + b"x" * (1 << 19)


@pytest.mark.volume
@pytest.mark.parametrize("request_", [RESET_ZONE, OPEN_ZONE, CLOSE_ZONE, FINISH_ZONE])
def test_zone_commands_to_what_has_no_zones(engine: Engine, fd: int, request_: int) -> None:
    engine.submit_command("command", fd, request_, 0, BLOCK)
    assert results(engine, 1) == {"command": (errno.ENOTTY, b"", 0)}


@pytest.mark.volume
def test_a_report_of_what_has_no_zones(fd: int) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOTTY)) as caught:
        report_zones(fd, 0, 16)
    assert caught.value.errno == errno.ENOTTY


@pytest.mark.volume
def test_many_requests_at_once(engine: Engine, fd: int) -> None:
    slots = [filled(i % 7 + 1) for i in range(200)]
    for i, slot in enumerate(slots):
        engine.submit_append(i, fd, i * 8 * BLOCK, slot, HEADER)
    written = results(engine, 200)
    buffers = [Slot(len(slot)) for slot in slots]
    for i, buffer in enumerate(buffers):
        engine.submit_read(i, fd, i * 8 * BLOCK, buffer, written[i][1])
    assert all(result[0] == 0 and result[2] == -1 for result in results(engine, 200).values())
    assert [bytes(memoryview(b)) for b in buffers] == [bytes(memoryview(s)) for s in slots]


@pytest.mark.volume
def test_the_event_tells_of_results(engine: Engine, fd: int) -> None:
    def readable() -> bool:
        return bool(select.select([engine.fileno()], [], [], 0)[0])

    assert not readable()
    assert engine.completions() == []
    engine.submit_flush("f", fd)
    assert list(results(engine, 1)) == ["f"]
    assert not readable()


@pytest.mark.volume
def test_a_buffer_is_held_until_its_result_is_collected(engine: Engine, fd: int) -> None:
    data = bytearray(BLOCK)
    token = object()
    references = sys.getrefcount(token)
    engine.submit_append(token, fd, 0, data)
    with pytest.raises(BufferError):
        data.clear()
    collected = results(engine, 1)
    data.clear()
    del collected
    assert sys.getrefcount(token) == references


@pytest.mark.volume
def test_close_finishes_what_was_submitted(fd: int) -> None:
    engine = Engine(1, 1)
    for i in range(50):
        engine.submit_append(i, fd, i * BLOCK, filled(1))
    engine.close()
    engine.close()
    assert os.fstat(fd).st_size == 50 * BLOCK
    assert sorted(token for token, *_ in engine.completions()) == list(range(50))
    assert engine.pending == 0
    with pytest.raises(ValueError, match="closed"):
        engine.submit_flush("f", fd)


@pytest.mark.volume
def test_an_engine_that_is_dropped_finishes_and_releases(fd: int) -> None:
    data = bytearray(BLOCK)
    engine = Engine(1, 1)
    for i in range(50):
        engine.submit_append(i, fd, i * BLOCK, data)
    del engine
    assert os.fstat(fd).st_size == 50 * BLOCK
    data.clear()


@pytest.mark.volume
@pytest.mark.parametrize(("writers", "readers"), [(0, 1), (1, 0), (65, 1), (1, -1)])
def test_thread_counts(writers: int, readers: int) -> None:
    with pytest.raises(ValueError, match="writers"):
        Engine(writers, readers)


@pytest.mark.volume
def test_threads_block_signals() -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    before = threads()
    engine = Engine(3, 2)
    started = threads() - before
    masks = set()
    for thread in started:
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        masks |= {int(x.split()[1], 16) for x in status.splitlines() if x.startswith("SigBlk")}
    engine.close()
    assert len(started) == 5
    # Bits 0-30 are signals 1 to 31; SIGKILL (9) and SIGSTOP (19) cannot be blocked.
    assert {mask & 0x7FFFFFFF for mask in masks} == {0x7FFFFFFF & ~(1 << 8 | 1 << 18)}


@pytest.mark.volume
def test_a_forked_child_can_drop_the_engine(engine: Engine, fd: int) -> None:
    child = os.fork()
    if child == 0:
        engine.close()  # would wait for ever for threads the child does not have
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    engine.submit_flush("f", fd)
    assert results(engine, 1)["f"][0] == 0
