"""What runs behind a mount: device, volume and FUSE from the first answer to the clean end.

Invariants
- The mount appears only when the volume is recovered, and goes before the volume ends: unmounting
  happens while requests are still answered.
- After a mistake in this program the mount stays, dead (ENOTCONN), until somebody unmounts it. Were
  it taken away, programs would go on and write to the bare directory below.
- A failure of the device is no such mistake: from then on the volume refuses writes, and reads go
  on.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyfuse3
import trio

from retainzfs import mkfs, mounts, unmounting
from retainzfs.control import Control
from retainzfs.device import Device, is_memory, open_target
from retainzfs.errors import MountBusy, MountError, RetainzError, TargetBusy
from retainzfs.fs import Filesystem, ServedVolume
from retainzfs.volume import Options

log = logging.getLogger(__name__)

CLOCK_REALTIME_COARSE = 5  # linux/time.h; Python has no name for it
READ_AHEAD_KIB = 4096  # cold reads a third faster than with 1024, which was twice as fast as 128
# After SIGTERM a busy mount is detached, and who still uses it gets so long (the shutdown of a
# machine waits about 90 s before it kills).
GRACE_S = 5.0
# umount(8) returns before the daemon has ended, and may be followed by a mount at once.
PATIENCE_S = 5.0


@dataclass(frozen=True)
class Setup:
    """What to serve and where.

    `directory` has no symbolic links; `fuse` is for libfuse, `settings` is config.toml.
    """

    target: str
    directory: str
    options: Options
    fuse: frozenset[str]
    settings: str


def kernel_time_ns() -> int:
    """Return the time as the kernel stamps files: utime(2) with no time brings its clock's.

    A finer clock of ours would run up to a tick ahead of it, and times would go backwards.
    """
    return time.clock_gettime_ns(CLOCK_REALTIME_COARSE)


async def serve(setup: Setup, ready: Callable[[], None]) -> bool:
    """Mount and serve until the mount is gone; `ready` is called when it answers.

    Returns whether the volume could write to its end; the log has told why not.
    Raises RetainzError when the mount could not be made or the last commit failed. Any other
    exception is a mistake, with the mount dead and still there.
    """
    device = await _opened(setup.target)
    try:
        await device.start()
        if is_memory(setup.target):
            await mkfs.format_started(device)
        wrong = await _serve_device(device, setup, ready)
    finally:
        await device.aclose()
    if isinstance(wrong, MountError):
        raise wrong
    return wrong is None


async def _opened(target: str) -> Device:
    """Open the target, which a daemon whose mount has just gone may still be writing to."""
    deadline = trio.current_time() + PATIENCE_S
    while True:
        try:
            return open_target(target)
        except TargetBusy:
            mounted = any(mount.source == target for mount in mounts.ours())
            if mounted or trio.current_time() > deadline:
                raise
        await trio.sleep(PATIENCE_S / 50)


async def _serve_device(
    device: Device, setup: Setup, ready: Callable[[], None]
) -> RetainzError | None:
    """Return why there was no mount (MountError), or what has stopped the volume. An exception from
    within would not end it cleanly."""
    session = False
    try:
        async with ServedVolume.mounted(device, setup.options) as volume:
            gc.freeze()  # no request shall wait for all that was recovered to be looked through
            fs = Filesystem(volume, Control(volume, setup.settings), os.geteuid())
            try:
                _mount(fs, setup)
            except MountError as error:
                return error
            session = True
            await _serve_mount(fs, setup, ready)
        return volume.failed
    finally:
        if session:
            pyfuse3.close(unmount=False)


def _mount(fs: Filesystem, setup: Setup) -> None:
    logging.getLogger("pyfuse3").addFilter(_worth_logging)
    with _captured_stderr() as said:
        try:
            pyfuse3.init(fs, setup.directory, set(setup.fuse))
        except RuntimeError as error:
            raise MountError(setup.directory, f"cannot mount: {said() or error}") from error


def _worth_logging(record: logging.LogRecord) -> bool:
    """Whether a message of pyfuse3 is about more than a caller that was killed while it waited."""
    return "fuse_reply_* failed with No such file" not in record.getMessage()


async def _serve_mount(fs: Filesystem, setup: Setup, ready: Callable[[], None]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_leave_on_signals, setup.directory, nursery.cancel_scope)
        nursery.start_soon(_report, fs, setup.directory, ready)
        fs.volume.served = True
        try:
            await pyfuse3.main()
        finally:
            fs.volume.served = False
        nursery.cancel_scope.cancel()
    log.info("%s: unmounted", setup.directory)


async def _report(fs: Filesystem, directory: str, ready: Callable[[], None]) -> None:
    await fs.started.wait()
    raise_read_ahead(directory)
    log.info("%s: mounted %s", directory, fs.volume.device.name)
    ready()


def raise_read_ahead(directory: str) -> None:
    """Let the kernel read ahead further on a mount; only root may, and it is no matter else."""
    mount = mounts.find_mount(directory)
    try:
        if mount is not None:
            path = Path("/sys/class/bdi", mount.device, "read_ahead_kb")
            path.write_text(f"{READ_AHEAD_KIB}\n")
    except OSError as error:
        log.debug("%s: read-ahead stays as it is: %s", directory, error)


async def _leave_on_signals(directory: str, serving: trio.CancelScope) -> None:
    """Unmount on SIGTERM and SIGINT; `pyfuse3.main` returns when the kernel has let go."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("%s: unmounting (%s)", directory, signal.Signals(number).name)
            try:
                await trio.to_thread.run_sync(unmounting.detach, directory)
            except RetainzError as error:
                log.warning("%s", error)
                if number == signal.SIGTERM and isinstance(error, MountBusy):
                    await _leave_anyway(directory, serving)


async def _leave_anyway(directory: str, serving: trio.CancelScope) -> None:
    """The machine goes down: take the mount out of the tree, do not wait for its users long."""
    await trio.to_thread.run_sync(lambda: unmounting.detach(directory, lazy=True))
    log.warning("%s: detached; who uses it has %g s to finish", directory, GRACE_S)
    await trio.sleep(GRACE_S)
    pyfuse3.terminate()  # requests that are being served end
    await trio.sleep(GRACE_S)
    serving.cancel()


@contextmanager
def _captured_stderr() -> Iterator[Callable[[], str]]:
    """libfuse and fusermount3 say on standard error why they refuse; let the caller have it."""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)

        def said() -> str:
            file.seek(0)
            return " ".join(file.read().decode(errors="replace").split())

        try:
            yield said
        finally:
            os.dup2(saved, 2)
            os.close(saved)
