"""The adapter without a kernel: what it answers, and what it tells the kernel to keep or forget."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest

from retainzfs import control, fs
from retainzfs.errors import DeviceError
from retainzfs.fs import Filesystem, ServedVolume
from retainzfs.volume import ROOT
from tests.helpers import formatted, options, small_device

pytestmark = pytest.mark.volume

CONTEXT: Any = SimpleNamespace(uid=1000, gid=1000, pid=1, umask=0o027)


@pytest.fixture
async def adapter() -> AsyncIterator[Filesystem]:
    device = await formatted(small_device())
    async with ServedVolume.mounted(device, options()) as volume:
        yield Filesystem(volume, control.Control(volume, ""), owner=1)


async def made(adapter: Filesystem, name: bytes, data: bytes) -> int:
    """Create a file through a write-only handle; return its inode."""
    info, entry = await adapter.create(ROOT, name, 0o644, os.O_WRONLY, CONTEXT)
    await adapter.write(info.fh, 0, data)
    await adapter.flush(info.fh)
    await adapter.release(info.fh)
    return entry.st_ino


async def test_the_umask_is_applied(adapter: Filesystem) -> None:
    info, entry = await adapter.create(ROOT, b"file", 0o666, os.O_WRONLY, CONTEXT)
    await adapter.release(info.fh)
    assert entry.st_mode == stat.S_IFREG | 0o640
    assert (entry.st_uid, entry.st_gid) == (1000, 1000)
    entry = await adapter.mkdir(ROOT, b"directory", stat.S_IFDIR | 0o777, CONTEXT)
    assert entry.st_mode == stat.S_IFDIR | 0o750


async def test_which_handles_use_the_page_cache(adapter: Filesystem) -> None:
    ino = await made(adapter, b"file", b"content")
    for flags, direct in ((os.O_WRONLY, True), (os.O_RDONLY, False), (os.O_RDWR, False)):
        info = await adapter.open(ino, flags, CONTEXT)
        assert info.direct_io is direct
        await adapter.release(info.fh)


async def test_pages_are_kept_while_nothing_was_written(adapter: Filesystem) -> None:
    ino = await made(adapter, b"file", b"content")

    async def keeps() -> bool:
        info = await adapter.open(ino, os.O_RDONLY, CONTEXT)
        await adapter.release(info.fh)
        return bool(info.keep_cache)

    assert [await keeps(), await keeps()] == [False, True]
    writer = await adapter.open(ino, os.O_WRONLY, CONTEXT)
    await adapter.write(writer.fh, 0, b"changed")
    await adapter.release(writer.fh)
    assert [await keeps(), await keeps()] == [False, True]
    await adapter.volume.setattr(ino, size=3)
    assert [await keeps(), await keeps()] == [False, True]
    await adapter.forget([(ino, 1)])
    assert not await keeps()


async def test_readers_see_what_went_past_the_page_cache(
    adapter: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired: list[int] = []
    monkeypatch.setattr(fs, "_expire_inode", expired.append)
    monkeypatch.setattr(fs, "DROPS_PAGES", False)
    ino = await made(adapter, b"file", b"content")
    assert expired == [], "nobody has pages"
    reader = await adapter.open(ino, os.O_RDONLY, CONTEXT)
    writer = await adapter.open(ino, os.O_WRONLY, CONTEXT)
    await adapter.flush(writer.fh)
    assert expired == [], "nothing was written"
    await adapter.write(writer.fh, 0, b"changed")
    await adapter.flush(writer.fh)
    assert expired == [ino]
    await adapter.fsync(writer.fh, False)
    assert expired == [ino], "nothing was written since"
    await adapter.release(reader.fh)
    await adapter.write(writer.fh, 0, b"again")
    await adapter.fsync(writer.fh, False)
    assert expired == [ino], "nobody has pages any more"
    await adapter.release(writer.fh)


async def test_the_kernel_keeps_no_name_that_may_be_reaped(
    adapter: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the one that a listing tells it."""
    await made(adapter, b"file", b"content")
    assert (await adapter.lookup(ROOT, b"file", CONTEXT)).entry_timeout == fs.TIMEOUT_S
    await adapter.volume.setxattr(ROOT, b"user.retainz.reap", b"1")
    assert (await adapter.lookup(ROOT, b"file", CONTEXT)).entry_timeout == 0
    assert (await adapter.mkdir(ROOT, b"step-1", 0o755, CONTEXT)).entry_timeout == 0
    told: list[float] = []

    def reply(_: object, __: bytes, entry: pyfuse3.EntryAttributes, ___: int) -> bool:
        told.append(entry.entry_timeout)
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    fh = await adapter.opendir(ROOT, CONTEXT)
    await adapter.readdir(fh, 0, pyfuse3.ReaddirToken())
    await adapter.releasedir(fh)
    assert set(told) == {0}


async def test_lookups_are_counted(adapter: Filesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    ino = await made(adapter, b"file", b"content")
    inode = adapter.volume.inode(ino)
    assert inode.lookups == 1
    await adapter.lookup(ROOT, b"file", CONTEXT)
    assert inode.lookups == 2
    monkeypatch.setattr(pyfuse3, "readdir_reply", lambda *_: True)
    fh = await adapter.opendir(ROOT, CONTEXT)
    await adapter.readdir(fh, 0, pyfuse3.ReaddirToken())
    await adapter.releasedir(fh)
    assert inode.lookups == 3
    assert adapter.volume.inode(ROOT).lookups == 0, ". and .. do not count"
    await adapter.forget([(ino, 3)])
    assert inode.lookups == 0


async def test_what_the_kernel_looked_up_outlives_its_name(adapter: Filesystem) -> None:
    """It may open it still: a lookup that was answered is followed by another request."""
    inode = await adapter.volume.make(ROOT, b"f", 0o100644, 0, 0)
    await adapter.lookup(ROOT, b"f", None)  # type: ignore[arg-type]
    await adapter.volume.make(ROOT, b"new", 0o100644, 0, 0)
    await adapter.rename(ROOT, b"new", ROOT, b"f", 0, None)  # type: ignore[arg-type]
    assert (await adapter.getattr(inode.ino, None)).st_nlink == 0  # type: ignore[arg-type]
    await adapter.forget([(inode.ino, 1)])
    assert inode.ino not in adapter.volume.namespace.inodes


async def test_what_was_reaped_does_not_wait_for_the_kernel(adapter: Filesystem) -> None:
    """Nobody tells it that the name is gone."""
    inode = await adapter.volume.make(ROOT, b"f", 0o100644, 0, 0)
    await adapter.lookup(ROOT, b"f", CONTEXT)
    fh = (await adapter.open(inode.ino, os.O_RDONLY, CONTEXT)).fh
    adapter.volume.remove_trees([(ROOT, b"f")])
    await adapter.volume.clear()
    assert (await adapter.getattr(inode.ino, CONTEXT)).st_nlink == 0, "it is open"
    await adapter.release(fh)
    with pytest.raises(pyfuse3.FUSEError) as gone:
        await adapter.getattr(inode.ino, CONTEXT)
    assert gone.value.errno == errno.ENOENT
    await adapter.forget([(inode.ino, 1)])


async def test_a_listing_is_a_snapshot_until_it_is_rewound(
    adapter: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[bytes] = []
    room = 3

    def reply(_token: object, name: bytes, _entry: object, _next_id: int) -> bool:
        if len(listed) == room:
            return False
        listed.append(name)
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    await made(adapter, b"a", b"")
    await made(adapter, b"b", b"")
    fh = await adapter.opendir(ROOT, CONTEXT)
    token = pyfuse3.ReaddirToken()
    await adapter.readdir(fh, 0, token)
    assert listed == [b".", b"..", b"a"]
    await made(adapter, b"c", b"")
    await adapter.unlink(ROOT, b"a", CONTEXT)
    room = 100
    await adapter.readdir(fh, 3, token)
    assert listed == [b".", b"..", b"a", b"b"]
    listed.clear()
    await adapter.readdir(fh, 0, token)
    assert listed == [b".", b"..", b"b", b"c"]
    await adapter.releasedir(fh)


async def test_our_errors_become_numbers_and_others_leave(
    adapter: Filesystem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await adapter.lookup(ROOT, b"nothing", CONTEXT)
    assert caught.value.errno == errno.ENOENT
    assert not caplog.records

    def broken(_ino: int) -> None:
        raise DeviceError("disk", "read", "it is gone")

    monkeypatch.setattr(adapter.volume, "inode", broken)
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await adapter.getattr(ROOT, CONTEXT)
    assert caught.value.errno == errno.EIO
    assert "it is gone" in caplog.text
    monkeypatch.setattr(adapter.volume, "inode", lambda _ino: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await adapter.getattr(ROOT, CONTEXT)


async def test_who_may_collect(adapter: Filesystem) -> None:
    owner: Any = SimpleNamespace(uid=1, gid=1, pid=1, umask=0)
    await adapter.setxattr(ROOT, b"user.retainz.gc", b"1", owner)
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await adapter.setxattr(ROOT, b"user.retainz.gc", b"1", CONTEXT)
    assert caught.value.errno == errno.EPERM
