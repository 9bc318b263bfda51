"""Extended attributes: stored, refused, computed, acted on."""

from __future__ import annotations

import errno
import json
import logging

import pytest

from retainzfs.attributes import XATTR_CREATE, XATTR_REPLACE
from retainzfs.errors import BadAttribute, NotYet
from retainzfs.layout import XATTR_VALUE_MAX
from retainzfs.volume import ROOT, FSError
from tests.helpers import DIRECTORY, FILE, formatted, mounted, put, small_device

pytestmark = pytest.mark.volume


async def test_attributes_are_stored_listed_and_removed() -> None:
    device = await formatted(small_device())
    async with mounted(device) as volume:
        ino = await put(volume, ROOT, b"f", b"x")
        before = volume.inode(ino).ctime_ns
        await volume.setxattr(ino, b"user.a", b"1", XATTR_CREATE)
        await volume.setxattr(ino, b"user.b", bytes(10_000))
        await volume.setxattr(ino, b"user.a", b"2", XATTR_REPLACE)
        assert volume.inode(ino).ctime_ns > before
        await volume.setxattr(ino, b"user.c", b"")
        await volume.removexattr(ino, b"user.c")
    async with mounted(device) as volume:
        assert sorted(volume.listxattr(ino)) == [b"user.a", b"user.b"]
        assert volume.getxattr(ino, b"user.a") == b"2"
        assert volume.getxattr(ino, b"user.b") == bytes(10_000)


@pytest.mark.parametrize(
    ("name", "value", "flags", "number"),
    [
        (b"user.a", b"", XATTR_CREATE, errno.EEXIST),
        (b"user.none", b"", XATTR_REPLACE, errno.ENODATA),
        (b"user." + b"n" * 300, b"", 0, errno.ERANGE),
        (b"user.a", bytes(XATTR_VALUE_MAX + 1), 0, errno.E2BIG),
        (b"system.posix_acl_access", b"", 0, errno.ENOTSUP),
    ],
)
async def test_what_cannot_be_stored(name: bytes, value: bytes, flags: int, number: int) -> None:
    async with mounted(await formatted(small_device())) as volume:
        ino = await put(volume, ROOT, b"f", b"x")
        await volume.setxattr(ino, b"user.a", b"1")
        with pytest.raises(FSError) as caught:
            await volume.setxattr(ino, name, value, flags)
        assert caught.value.errno == number
        assert volume.listxattr(ino) == [b"user.a"]


async def test_what_is_not_there() -> None:
    async with mounted(await formatted(small_device())) as volume:
        for name in (b"user.a", b"user.retainz.keep_last", b"user.retainz.state"):
            with pytest.raises(FSError) as caught:
                volume.getxattr(ROOT, name)
            assert caught.value.errno == errno.ENODATA
        with pytest.raises(FSError) as caught:
            await volume.removexattr(ROOT, b"user.a")
        assert caught.value.errno == errno.ENODATA


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"keep_last", b"0"),
        (b"keep_last", b"many"),
        (b"cadence", b"soon"),
        (b"class", b"important"),
        (b"retire", b"nan"),
        (b"state", b"complete"),
        (b"keeplast", b"3"),
        (b"gc", b"2"),
    ],
)
async def test_a_wrong_value_changes_nothing(
    name: bytes, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(await formatted(small_device())) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"3")
        await put(volume, ROOT, b"step-1.pt", b"x" * 5000)
        before = (volume.explain(ROOT), volume.generations(ROOT), volume.listxattr(ROOT))
        with (
            caplog.at_level(logging.WARNING, "retainzfs"),
            pytest.raises(BadAttribute, match="accepted") as caught,
        ):
            await volume.setxattr(ROOT, b"user.retainz." + name, value)
        assert caught.value.errno == errno.EINVAL
        assert f"user.retainz.{name.decode()}" in caplog.text
        assert before == (volume.explain(ROOT), volume.generations(ROOT), volume.listxattr(ROOT))


async def test_what_a_later_version_has() -> None:
    async with mounted(await formatted(small_device())) as volume:
        with pytest.raises(NotYet, match="publish"):
            await volume.setxattr(ROOT, b"user.retainz.publish", b"all")
        assert volume.listxattr(ROOT) == []


async def test_a_training_step_is_no_epoch() -> None:
    async with mounted(await formatted(small_device())) as volume:
        await volume.setxattr(ROOT, b"user.retainz.cadence", b"60s")
        ino = await put(volume, ROOT, b"step-1.pt", b"x" * 5000)
        with pytest.raises(BadAttribute, match="no training step"):
            await volume.setxattr(ino, b"user.retainz.retire", b"500000")
        await volume.setxattr(ino, b"user.retainz.retire", b"2000")


async def test_computed_attributes_agree_with_the_volume() -> None:
    async with mounted(await formatted(small_device())) as volume:
        run = (await volume.make(ROOT, b"run", DIRECTORY, 0, 0)).ino
        await volume.setxattr(run, b"user.retainz.keep_last", b"2")
        ino = await put(volume, run, b"step-4.pt", b"x" * 9000)
        await volume.fsync(ino)
        assert volume.getxattr(ino, b"user.retainz.stream") == b"/run"
        assert json.loads(volume.getxattr(ino, b"user.retainz.zones")) == [4]
        (extent,) = json.loads(volume.getxattr(ino, b"user.retainz.extents"))
        assert extent[:2] == [0, 3]
        (told,) = json.loads(volume.getxattr(run, b"user.retainz.generations"))
        assert (told["number"], told["path"], told["size"]) == (4, "/run/step-4.pt", 9000)
        explained = json.loads(volume.getxattr(ino, b"user.retainz.explain"))
        assert explained["attributes"]["keep_last"] == {"value": 2, "from": "/run"}
        assert volume.listxattr(ino) == [], "computed attributes are not listed"


async def test_acts() -> None:
    async with mounted(await formatted(small_device())) as volume:
        for i in range(4):
            await put(volume, ROOT, b"f%d" % i, b"x" * 300_000)
        await volume.syncfs()
        for i in range(4):
            await volume.unlink(ROOT, b"f%d" % i)
        await volume.setxattr(ROOT, b"user.retainz.gc", b"1")
        assert volume.statistics()["dead"] == 0
        plain = (await volume.make(ROOT, b"plain", FILE, 0, 0)).ino
        with pytest.raises(BadAttribute, match="in no generation"):
            await volume.setxattr(plain, b"user.retainz.commit", b"1")
        assert volume.listxattr(ROOT) == []


async def test_a_name_that_is_no_text_is_no_attribute() -> None:
    async with mounted(await formatted(small_device())) as volume:
        with pytest.raises(FSError) as caught:
            volume.getxattr(ROOT, b"user.retainz.\xff")
        assert caught.value.errno == errno.ENODATA
