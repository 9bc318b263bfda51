"""Every error that reaches a user: errno for the FUSE side, exit code for the commands, message.

The docstring of a class is its message, a format string over the arguments of the exception. A
message says what happened, to which path, and what to do.
"""

import errno
import os

GONE = (errno.ENODEV, errno.ENXIO)  # what the kernel answers for a device that was removed


class RetainzError(Exception):
    """{}"""

    errno: int = errno.EIO
    exit_code: int = 1

    def __str__(self) -> str:
        return " ".join((self.__doc__ or "{}").split()).format(*self.args)


class FSError(RetainzError):
    """{1}: {2}"""

    def __init__(self, number: int, where: object = "", text: str = "") -> None:
        super().__init__(number, where, text or os.strerror(number))
        self.errno = number


class Unreadable(FSError):
    """{1}: {2}"""  # whoever finds the damage logs it, so that nobody else does


class UsageError(RetainzError):
    """{}"""

    errno = errno.EINVAL
    exit_code = 2


class BadConfig(UsageError):
    """{}: {}"""


class TargetMissing(RetainzError):
    """{}: no such target. Give --create --size S to make an image there, or name a device."""

    errno = errno.ENOENT


class TargetBusy(RetainzError):
    """{}: in use ({}). Unmount it first."""

    errno = errno.EBUSY


class TargetHoldsData(RetainzError):
    """{}: already holds {}. Nothing was changed; --force overwrites it."""

    errno = errno.EEXIST


class TargetTooSmall(RetainzError):
    """{}: {} bytes are too small; the minimum with these zones is {} bytes."""

    errno = errno.EINVAL


class BadGeometry(RetainzError):
    """{}: {}"""

    errno = errno.EINVAL
    exit_code = 2


class WriteOrder(RetainzError):
    """{}: the scheduler {} may mix up the writes to a zone, and setting another one failed ({}).
    Do as root: echo {} > {}"""

    errno = errno.EINVAL


class ForeignTarget(RetainzError):
    """{}: not a retainzfs target ({}). Format it with 'retainzfs mkfs'."""

    errno = errno.EINVAL


class NewerFormat(RetainzError):
    """{}: written by a newer retainzfs ({}). Upgrade retainzfs to mount it; nothing was changed."""

    errno = errno.EPROTONOSUPPORT


class Damaged(RetainzError):
    """{}: damaged: {}. Nothing was changed; 'retainzfs fsck' shows more."""

    errno = errno.EUCLEAN
    exit_code = 3


class ZoneRuleError(RetainzError):
    """{}: zone {}: {}"""

    errno = errno.EIO


class DeviceError(RetainzError):
    """{}: {}: {}"""

    errno = errno.EIO


class DeviceGone(RetainzError):
    """{}: the device is gone ({}). Unmount, see to the device and its connection, and mount again:
    what was synced is there."""

    errno = errno.EIO


class DeviceFails(RetainzError):
    """{}: more than {} errors of the device within {:g} s, the last one: {}. Copy what you need to
    another device, unmount, and replace this one."""

    errno = errno.EIO


class ChecksumError(RetainzError):
    """{}: zone {}, byte {}: checksum mismatch; the stored bytes are not those that were written"""

    errno = errno.EIO


class NoSpace(RetainzError):
    """no space: {}"""

    errno = errno.ENOSPC


class BadAttribute(UsageError):
    """{}: {}; accepted: {}"""


class NotRetainzfs(RetainzError):
    """{}: no file or directory of a mounted retainzfs. Give a path below a mount; 'retainzfs
    status' lists them."""

    errno = errno.ENOTSUP


class NoGeneration(RetainzError):
    """{}: in no generation ({}). Save under a name with a number, like step-1000 or step-1000.pt;
    docs/attributes.md has the names."""

    errno = errno.EINVAL


class IncompleteGeneration(RetainzError):
    """{}: generation {} is incomplete: {}. Save it again; the older ones are as they were."""


class NotYet(RetainzError):
    """{}: not supported by this version"""

    errno = errno.ENOTSUP


class ReadOnly(RetainzError):
    """{}: the filesystem is read-only: {}. Unmount it and run 'retainzfs fsck'."""

    errno = errno.EROFS


class MountError(RetainzError):
    """{}: {}"""

    errno = errno.EINVAL


class MountBusy(RetainzError):
    """{}: busy, used by {}. Nothing was changed."""

    errno = errno.EBUSY
