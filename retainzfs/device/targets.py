"""From what the user typed to a device: open a formatted target, or format one."""

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TypedDict, Unpack

from retainzfs._zio import Engine
from retainzfs.device import contents
from retainzfs.device.emulated import EmulatedDevice
from retainzfs.device.head import (
    PREALLOCATED,
    Header,
    StatePage,
    base_of,
    encode_header,
)
from retainzfs.device.kernel import KernelDevice, written_at_start
from retainzfs.device.memory import MemoryDevice
from retainzfs.device.protocol import (
    BLOCK,
    MIN_ZONE_SIZE,
    MIN_ZONES,
    Condition,
    Device,
    Geometry,
    device_error,
)
from retainzfs.device.rules import ZoneState
from retainzfs.device.sysfs import BlockDevice, directory
from retainzfs.errors import (
    BadGeometry,
    ForeignTarget,
    TargetBusy,
    TargetHoldsData,
    TargetMissing,
    TargetTooSmall,
    UsageError,
)

MEMORY = "mem:"

DEFAULT_ZONE_SIZE = 64 << 20
LARGE_DEVICE = 4 << 30  # from this size on zones have their default size
DEFAULT_ZONES = 64  # a smaller device has at least so many
DEFAULT_MAX_ACTIVE = 14  # as common NVMe ZNS drives
DEFAULT_MAX_OPEN = 8


class Wanted(TypedDict, total=False):
    """How a target is to be formatted: sizes in bytes, limits in zones (0: no limit), None for the
    default. See `create_target`."""

    size: int | None
    zone_size: int | None
    zone_capacity: int | None
    max_open: int | None
    max_active: int | None
    force: bool
    preallocate: bool


def is_memory(target: str) -> bool:
    """Whether a target is memory, which needs no format and is always new."""
    return target.startswith(MEMORY)


def open_target(target: str, *, readonly: bool = False) -> Device:
    """Open a formatted target: an image, a block device, or `mem:SIZE`, which is always new.

    A host-managed zoned block device has its own zones, any other target emulated ones.

    The target is locked against a second use until the device is closed. Call `start` on it
    before any operation. Errors: TargetMissing, TargetBusy, ForeignTarget, NewerFormat, Damaged.
    """
    if is_memory(target):
        return MemoryDevice(plan_geometry(target, _memory_size(target), {}, headless=True), target)
    fd = _opened(target, readonly=readonly)
    with _closed_on_error(target, "open", fd):
        if _is_zoned(target, fd):
            return KernelDevice(target, fd, readonly=readonly)
        return EmulatedDevice(target, fd, readonly=readonly)


def create_target(target: str, **wanted: Unpack[Wanted]) -> Device:
    """Format a target with empty zones and open it.

    A missing image is created with exactly `size` bytes, sparse unless `preallocate`. Without
    `force` a target that is not blank is refused. After an error the target is as it was; the zones
    of a zoned block device are so in any case, and the caller resets them. Errors: TargetHoldsData,
    TargetBusy, TargetTooSmall, BadGeometry, WriteOrder, TargetMissing, UsageError, DeviceError.
    """
    size = wanted.get("size")
    if is_memory(target):
        size = _memory_size(target) if size is None else size
        return MemoryDevice(plan_geometry(target, size, wanted, headless=True), target)
    created = not os.path.lexists(target)
    if created and size is None:
        raise TargetMissing(target)
    fd = _opened(target, readonly=False, create=created)
    with _closed_on_error(target, "format", fd, unlink=created):
        if _is_zoned(target, fd):
            return _create_zoned(target, fd, wanted)
        return _create_emulated(target, fd, wanted)


def _create_zoned(target: str, fd: int, wanted: Wanted) -> KernelDevice:
    """The device with its own zones, which nobody can choose."""
    force = wanted.get("force", False)
    found = None if force else contents.known(fd, written_at_start(fd))
    device = KernelDevice(target, fd)
    for name, value in asdict(device.geometry).items():
        if wanted.get(name, value) not in (None, value):
            what = f"{name.replace('_', ' ')} of {wanted.get(name)} wanted"
            raise BadGeometry(target, f"{what}, but this zoned device has {value}")
    for name in ("size", "preallocate"):
        if wanted.get(name):
            raise BadGeometry(target, f"a zoned device takes no --{name}; leave it out")
    if not force:
        blank = (Condition.EMPTY, Condition.READ_ONLY, Condition.OFFLINE)
        used = sum(zone.condition not in blank for zone in device.report())
        if used and found is None:
            found = f"data in {used} of {device.geometry.zone_count} zones"
        if found is not None:
            raise TargetHoldsData(target, found)
    elif device.address(0):
        contents.erase(fd)  # what the conventional zones before ours say of an earlier filesystem
    return device


def _create_emulated(target: str, fd: int, wanted: Wanted) -> EmulatedDevice:
    old_size = os.lseek(fd, 0, os.SEEK_END)
    new_size = _new_size(target, fd, old_size, wanted.get("size"))
    geometry = plan_geometry(target, new_size, wanted)
    if not wanted.get("force") and (found := contents.identify(fd, old_size)) is not None:
        raise TargetHoldsData(target, found)
    flags = PREALLOCATED if wanted.get("preallocate") else 0
    header = Header(secrets.token_bytes(16), base_of(geometry.zone_count), geometry, flags)
    _format(fd, header, old_size, new_size)
    return EmulatedDevice(target, fd)


def plan_geometry(name: str, size: int, wanted: Wanted, *, headless: bool = False) -> Geometry:
    """The geometry of a device of `size` bytes; `headless` without room for the emulated head.

    Errors: BadGeometry, TargetTooSmall (with the minimum in bytes).
    """
    zone_size, zone_capacity = wanted.get("zone_size"), wanted.get("zone_capacity")
    max_open, max_active = wanted.get("max_open"), wanted.get("max_active")
    zone_size = _default_zone_size(size, headless) if zone_size is None else zone_size
    zone_capacity = zone_size if zone_capacity is None else zone_capacity
    if max_active is None:
        max_active = max(DEFAULT_MAX_ACTIVE, max_open or 0)
    if max_open is None:
        max_open = min(DEFAULT_MAX_OPEN, max_active or DEFAULT_MAX_OPEN)
    shape = Geometry(zone_size, zone_capacity, MIN_ZONES, max_open, max_active)
    if (flaw := shape.flaw()) is not None:
        raise BadGeometry(name, flaw)
    count = _zones_in(size, zone_size, headless)
    if count < MIN_ZONES:
        minimum = MIN_ZONES * zone_size + (0 if headless else base_of(MIN_ZONES))
        raise TargetTooSmall(name, size, minimum)
    return replace(shape, zone_count=count)


def _zones_in(size: int, zone_size: int, headless: bool) -> int:
    """Zones that fit behind a head that is large enough for them."""
    count = size // zone_size
    while not headless and count > 0 and base_of(count) + count * zone_size > size:
        count -= 1
    return count


def _default_zone_size(size: int, headless: bool) -> int:
    zone_size = DEFAULT_ZONE_SIZE
    if size < LARGE_DEVICE:
        while zone_size > MIN_ZONE_SIZE and _zones_in(size, zone_size, headless) < DEFAULT_ZONES:
            zone_size //= 2
    return zone_size


# --- formatting ---------------------------------------------------------------------------------


def _new_size(target: str, fd: int, old_size: int, size: int | None) -> int:
    if size is None:
        return old_size
    if size > old_size and stat.S_ISBLK(os.fstat(fd).st_mode):
        raise BadGeometry(target, f"size of {size} bytes, but the device has {old_size}")
    return size


def _format(fd: int, header: Header, old_size: int, new_size: int) -> None:
    """Write the head; undo everything on failure."""
    regular = stat.S_ISREG(os.fstat(fd).st_mode)
    kept = os.pread(fd, min(header.base, old_size), 0)
    try:
        if regular:
            os.ftruncate(fd, new_size)
            if header.compatible & PREALLOCATED:
                os.posix_fallocate(fd, 0, new_size)
        _write(fd, _head(header), 0)
        os.fdatasync(fd)
        if not header.compatible & PREALLOCATED:
            _discard_zones(fd, header)
    except BaseException:
        if regular:
            os.ftruncate(fd, old_size)
        _write(fd, kept, 0)
        os.fdatasync(fd)
        raise


def _head(header: Header) -> bytes:
    """The whole head: whatever was there is gone, older copies of state pages included."""
    image = bytearray(header.base)
    for copy in (0, 1):
        image[copy * BLOCK : (copy + 1) * BLOCK] = encode_header(header)
    for index in range(header.pages):
        page = StatePage(header, index)
        for zone in page.zones:
            page.put(zone, ZoneState())
        image[page.next_offset : page.next_offset + BLOCK] = memoryview(page.seal())
    return bytes(image)


def _discard_zones(fd: int, header: Header) -> None:
    """Give back what an earlier use of the target left in the zones, where that is possible."""
    engine = Engine(1, 1)
    length = header.geometry.zone_count * header.geometry.zone_size
    engine.submit_discard(None, fd, header.base, length, device=stat.S_ISBLK(os.fstat(fd).st_mode))
    engine.close()
    [(_, error, _, _)] = engine.completions()
    if error not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(error, os.strerror(error))


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


# --- opening ------------------------------------------------------------------------------------


def _opened(target: str, *, readonly: bool, create: bool = False) -> int:
    """A locked descriptor of a regular file or block device."""
    try:
        mode = 0 if create else os.stat(target).st_mode
    except FileNotFoundError as error:
        raise TargetMissing(target) from error
    except OSError as error:
        raise device_error(target, "stat", error) from error
    if not create and not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise ForeignTarget(target, "neither a regular file nor a block device")
    flags = (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC
    # O_EXCL without O_CREAT claims a block device (open(2)).
    flags |= os.O_CREAT | os.O_EXCL if create else os.O_EXCL if stat.S_ISBLK(mode) else 0
    try:
        fd = os.open(target, flags, 0o600)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise TargetBusy(target, _user(target)) from error
        raise device_error(target, "open", error) from error
    with _closed_on_error(target, "open", fd):
        _claim(target, fd, readonly)
    return fd


def _claim(target: str, fd: int, readonly: bool) -> None:
    if (user := contents.users(fd, target)) is not None and not readonly:
        raise TargetBusy(target, user)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if readonly else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TargetBusy(target, "locked by another retainzfs") from error


def _is_zoned(target: str, fd: int) -> bool:
    """Whether the target has zones of its own. A partition of it has not all of them: refused."""
    if not stat.S_ISBLK(os.fstat(fd).st_mode):
        return False
    device = BlockDevice(directory(fd))
    if device.zoned and device.is_partition:
        disk = device.disk.resolve().name
        raise UsageError(f"{target}: a partition of a zoned disk; give the disk, /dev/{disk}")
    return device.zoned


def _user(target: str) -> str:
    fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        user = contents.users(fd, target) or contents.server(target)
        return user or "opened exclusively by another program"
    finally:
        os.close(fd)


@contextmanager
def _closed_on_error(target: str, what: str, fd: int, *, unlink: bool = False) -> Iterator[None]:
    """Undo the opening when something fails; the host's errors become DeviceError."""
    try:
        yield
    except BaseException as error:
        if unlink:
            os.unlink(target)
        os.close(fd)
        if isinstance(error, OSError):
            raise device_error(target, what, error) from error
        raise


# --- memory -------------------------------------------------------------------------------------


def _memory_size(target: str) -> int:
    text = target.removeprefix(MEMORY)
    found = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", text)
    if found is None:
        raise UsageError(f"{target}: not a size; write it as mem:256M")
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")
