"""Damaged copies in the head of an emulated device: found, and mended from the good ones."""

import os
from dataclasses import dataclass

from retainzfs.device.emulated import EmulatedDevice, read_exactly, read_header
from retainzfs.device.head import Header, HeadError, decode_header, decode_page
from retainzfs.device.protocol import BLOCK, Device, device_error


@dataclass(frozen=True, slots=True)
class HeadFault:
    """A copy at byte `offset` that should hold `good`."""

    text: str
    offset: int
    good: bytes
    torn: bool  # a power cut may have left it so


def read_head(device: Device) -> bytes:
    """Return all bytes before the first zone; none of a device whose zones need no head.

    Raises ForeignTarget, Damaged, DeviceError.
    """
    if not isinstance(device, EmulatedDevice):
        return b""
    fd = _opened(device.name, os.O_RDONLY)
    try:
        return read_exactly(fd, 0, read_header(device.name, fd).base)
    finally:
        os.close(fd)


def head_faults(device: Device) -> list[HeadFault]:
    """Return the copies that are damaged beside a good one. Raises as `read_head` does."""
    head = read_head(device)
    if not head:
        return []
    copies = [head[:BLOCK], head[BLOCK : 2 * BLOCK]]
    headers: list[Header | None] = []
    for copy in copies:
        try:
            headers.append(decode_header(copy))
        except HeadError:
            headers.append(None)
    good = 0 if headers[0] is not None else 1
    header = headers[good]
    assert header is not None, "a device that was opened has one good header"
    faults: list[HeadFault] = []
    if copies[1 - good] != copies[good]:
        text = f"copy {1 - good} of the device's header is damaged"
        faults.append(HeadFault(text, (1 - good) * BLOCK, copies[good], torn=False))
    for index in range(header.pages):
        faults += _page_faults(header, index, head)
    return faults


def _page_faults(header: Header, index: int, head: bytes) -> list[HeadFault]:
    good: list[tuple[int, bytes]] = []
    bad: list[tuple[int, int]] = []  # copy, offset
    for copy in (0, 1):
        offset = header.page_offset(index, copy)
        block = head[offset : offset + BLOCK]
        try:
            good.append((decode_page(header, index, block)[0], block))
        except HeadError:
            if any(block):  # zeros: nothing was flushed yet
                bad.append((copy, offset))
    if not good:
        return []
    zones = header.page_zones(index)
    what = f"of the state of zones {zones[0]} to {zones[-1]} is damaged"
    _, newest = max(good)
    return [HeadFault(f"copy {copy} {what}", at, newest, torn=True) for copy, at in bad]


def mend_head(target: str, faults: list[HeadFault]) -> None:
    """Write the good copies over the damaged ones. Raises DeviceError."""
    if not faults:
        return
    fd = _opened(target, os.O_WRONLY)
    try:
        for fault in faults:
            os.pwrite(fd, fault.good, fault.offset)
        os.fdatasync(fd)
    except OSError as error:
        raise device_error(target, "write of the head", error) from error
    finally:
        os.close(fd)


def _opened(target: str, flags: int) -> int:
    try:
        return os.open(target, flags | os.O_CLOEXEC)
    except OSError as error:
        raise device_error(target, "open", error) from error
