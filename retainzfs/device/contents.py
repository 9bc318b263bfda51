"""What a target already holds and who uses it: looked at before anything is overwritten."""

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from retainzfs import mounts
from retainzfs._zio import Slot
from retainzfs.device import head, sysfs


class Magic(NamedTuple):
    """`value` at byte `offset` of the target means `what`."""

    offset: int
    value: bytes
    what: str


# Offsets and values as in the formats' own headers and in file(1)'s database. Most specific first:
# a partition table may share its sector with a filesystem.
MAGICS = (
    Magic(0, head.MAGIC, "a retainzfs filesystem"),
    Magic(4096, head.MAGIC, "a retainzfs filesystem (first header copy lost)"),
    Magic(0, b"LUKS\xba\xbe", "a LUKS encrypted volume"),
    Magic(512, b"LABELONE", "an LVM physical volume"),
    Magic(0, b"XFSB", "an xfs filesystem"),
    Magic(65536 + 64, b"_BHRfS_M", "a btrfs filesystem"),
    Magic(1024, struct.pack("<I", 0xF2F52010), "an f2fs filesystem"),
    Magic(4096 - 10, b"SWAPSPACE2", "swap space"),
    Magic(4096 - 10, b"SWAP-SPACE", "swap space"),
    Magic(0, b"SFZ\0", "a zonefs filesystem"),
    Magic(1024, struct.pack("<I", 0xE0F5E1E2), "an erofs filesystem"),
    Magic(4096, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca", "a bcachefs or bcache device"),
    Magic(4096, struct.pack("<I", 0xA92B4EFC), "a member of a Linux RAID"),
    Magic(0, struct.pack("<I", 0xA92B4EFC), "a member of a Linux RAID"),
    Magic(0, b"hsqs", "a squashfs filesystem"),
    Magic(3, b"NTFS    ", "an NTFS filesystem"),
    Magic(3, b"EXFAT   ", "an exFAT filesystem"),
    Magic(82, b"FAT32   ", "a FAT filesystem"),
    Magic(54, b"FAT16   ", "a FAT filesystem"),
    Magic(54, b"FAT12   ", "a FAT filesystem"),
    Magic(32768 + 1, b"CD001", "an ISO 9660 image"),
    Magic(32768 + 1, b"BEA01", "a UDF filesystem"),
    Magic(512, b"EFI PART", "a GPT partition table"),
    Magic(4096, b"EFI PART", "a GPT partition table"),
    Magic(0, b"PK\x03\x04", "a zip archive"),
    Magic(0, b"PK\x05\x06", "a zip archive"),
    Magic(257, b"ustar", "a tar archive"),
    Magic(0, b"\x1f\x8b", "gzip data"),
    Magic(0, b"\x28\xb5\x2f\xfd", "zstd data"),
    Magic(0, b"\xfd7zXZ\0", "xz data"),
    Magic(0, b"QFI\xfb", "a QEMU disk image"),
    Magic(0, b"\x7fELF", "an ELF program"),
    Magic(0, b"SQLite format 3\0", "an SQLite database"),
    Magic(0, b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    Magic(510, b"\x55\xaa", "a partition table or boot sector"),
)
_PROBED = 68 << 10  # bytes from the start that hold every magic above

_EXT_MAGIC = 1024 + 56, b"\x53\xef"
_EXT_FEATURES = struct.Struct("<II")  # compatible, incompatible at 1024 + 92
_EXT_HAS_JOURNAL = 0x4
_EXT4_FLAGS = 0x40 | 0x80 | 0x200  # extents, 64bit, flex_bg

# A regular file is searched through (its holes cost nothing); of a device, which may be large and
# slow, the ends and equally spaced samples.
_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)
_DEVICE_START = 16 << 20
_SAMPLES = 256


def identify(fd: int, size: int) -> str | None:
    """What the open target of `size` bytes holds, for a message; None if it is blank."""
    if (what := known(fd, size)) is not None:
        return what
    for offset, length in _searched(fd, size):
        piece = os.pread(fd, length, offset)
        if piece != _ZEROS[: len(piece)]:
            return f"data (from byte {offset + len(piece) - len(piece.lstrip(_ZEROS[:1]))} on)"
    return None


def known(fd: int, size: int) -> str | None:
    """What begins in the `size` bytes of the open target, if it is a format that we know."""
    start = os.pread(fd, min(size, _PROBED), 0)
    if (ext := _ext(start)) is not None:
        return ext
    for magic in MAGICS:
        if start[magic.offset :].startswith(magic.value):
            return magic.what
    return None


def erase(fd: int) -> None:
    """Overwrite with zeros, durably, what `known` goes by."""
    done = 0
    while done < _PROBED:
        done += os.pwrite(fd, memoryview(Slot(_PROBED))[done:], done)
    os.fdatasync(fd)


def users(fd: int, path: str) -> str | None:
    """Who uses the target, as far as the kernel tells: a mount, swap, a loop device; or None."""
    status = os.fstat(fd)
    real = os.path.realpath(path)
    if stat.S_ISBLK(status.st_mode) and (user := _device_user(sysfs.directory(fd))) is not None:
        return user
    for line in Path("/proc/swaps").read_text().splitlines()[1:]:
        if _unescaped(line.split()[0]) == real:
            return "active swap space"
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        if backing.read_text().rstrip("\n") == real:
            return f"attached to /dev/{backing.parts[3]}"
    return None


def _device_user(device: Path) -> str | None:
    """Who uses the device or one of its partitions."""
    parts = [device, *(found.parent for found in device.glob("*/partition"))]
    numbers = {(part / "dev").read_text().strip() for part in parts}
    for mount in mounts.all_mounts():
        if mount.device in numbers:
            return f"mounted on {mount.directory}"
    for part in parts:
        if held := sorted(holder.name for holder in part.glob("holders/*")):
            return f"held by {', '.join(held)}"
    return None


def server(path: str) -> str | None:
    """Where a retainzfs serves the target, by the mount table alone: it may have died."""
    real = os.path.realpath(path)
    served = (mount for mount in mounts.ours() if os.path.realpath(mount.source) == real)
    return next((f"mounted on {mount.directory}" for mount in served), None)


def _ext(start: bytes) -> str | None:
    offset, value = _EXT_MAGIC
    if start[offset : offset + len(value)] != value:
        return None
    compatible, incompatible = _EXT_FEATURES.unpack_from(start, 1024 + 92)
    if incompatible & _EXT4_FLAGS:
        return "an ext4 filesystem"
    return f"an {'ext3' if compatible & _EXT_HAS_JOURNAL else 'ext2'} filesystem"


def _searched(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the pieces that are looked at for data."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        for begin, end in _data_ranges(fd, size):
            yield from _pieces(begin, end)
        return
    yield from _pieces(0, min(size, _DEVICE_START))
    yield from _pieces(max(0, size - _CHUNK), size)
    step = max(1, size // _SAMPLES // 4096) * 4096
    for offset in range(0, size - 4096, step):
        yield offset, 4096


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for offset in range(begin, end, _CHUNK):
        yield offset, min(_CHUNK, end - offset)


def _data_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """What lseek(2) says is not a hole."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        yield begin, end


def _unescaped(field: str) -> str:
    """The kernel writes blanks in its tables as octal escapes."""
    for code in ("\\040", "\\011", "\\012", "\\134"):
        field = field.replace(code, chr(int(code[1:], 8)))
    return field
