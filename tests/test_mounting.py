"""Mounting: options, refusals, the helper that mount(8) calls, mounting again at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retainzfs import mounting, mounts, unmounting
from retainzfs.device.head import Header, decode_header, encode_header
from retainzfs.errors import MountError, NotYet, UsageError
from retainzfs.layout import BLOCK
from tests.conftest import COMMAND, PATIENCE_S, Live, retainzfs

# Options


@pytest.mark.pure
def test_options_are_read() -> None:
    options = mounting.parse_options(["rw,commit=close,pool=32M", "allow_other,nosuid,commit=2.5"])
    assert options.commit == 2.5
    assert options.pool == 32 << 20
    assert options.allow_other
    assert options.kernel == {"nosuid"}
    assert options.policy == "plan"


@pytest.mark.pure
@pytest.mark.parametrize(
    "text", ["defaults,noauto,user,_netdev,nofail", "x-systemd.automount,x-foo=bar", "relatime,,rw"]
)
def test_what_fstab_says_is_accepted(text: str) -> None:
    assert mounting.parse_options([text]) == mounting.MountOptions()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("comit=close", "unknown mount option 'comit=close'; known: allow_other, commit="),
        ("commit", "unknown mount option 'commit'"),
        ("commit=never", "commit=never"),
        ("policy=best", "policy=best"),
        ("pool=1K", "the least is 16 MiB"),
        ("pool=much", "pool=much"),
    ],
)
def test_other_options_are_named(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        mounting.parse_options([text])
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.pure
def test_sloppy_passes_over_unknown_options() -> None:
    assert mounting.parse_options(["comit=close"], sloppy=True) == mounting.MountOptions()


@pytest.mark.pure
def test_read_only_is_not_yet_there() -> None:
    with pytest.raises(NotYet):
        mounting.parse_options(["ro"])


# Refusals


def test_directories_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    for name, message in (
        ("missing", "mkdir"),
        ("file", "Not a directory"),
        ("full", "not empty"),
    ):
        with pytest.raises(MountError, match=message):
            mounting.check_directory(str(tmp_path / name))
    with pytest.raises(MountError, match="is mounted there"):
        mounting.check_directory("/proc")


@pytest.mark.fuse
def test_refusals_leave_nothing_behind(fresh: Live) -> None:
    other = fresh.path.parent / "other"
    other.mkdir()
    foreign = fresh.path.parent / "foreign"
    foreign.write_bytes(b"not ours" * 1000)
    fresh.mount()
    for target, directory, message in (
        (fresh.image, other, "in use"),
        (fresh.image, fresh.path, "is mounted there"),
        (fresh.path.parent / "missing", other, "no such target"),
        (foreign, other, "not a retainzfs target"),
    ):
        done = retainzfs("mount", target, directory, "--log", fresh.log)
        assert done.returncode == 1
        assert message in done.stderr
        assert done.stderr.startswith("retainzfs: ")
        assert len(done.stderr.splitlines()) == 1
        assert done.stdout == ""
        assert mounts.find_mount(str(other)) is None
    assert foreign.read_bytes() == b"not ours" * 1000
    assert not (fresh.path.parent / "missing").exists()


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("harm", "code", "message"),
    [
        ("cut", 3, "it has 134217728 bytes, but was formatted with "),
        ("flipped", 3, "both copies of the header: checksum mismatch"),
        ("newer", 1, "written by a newer retainzfs (format version 9, this one knows 1)"),
        ("other", 1, "not a retainzfs target"),
    ],
)
def test_broken_images_are_refused(fresh: Live, harm: str, code: int, message: str) -> None:
    size = fresh.image.stat().st_size
    with fresh.image.open("r+b") as file:
        head = bytearray(file.read(2 * BLOCK))
        if harm == "cut":
            size //= 2
        elif harm == "flipped":
            head[20] ^= 1
            head[BLOCK + 20] ^= 1
        elif harm == "newer":
            header = decode_header(bytes(head[:BLOCK]))
            fields = {name: getattr(header, name) for name in Header.__slots__}
            head = bytearray(encode_header(Header(**fields | {"version": 9})) * 2)
        else:
            head = bytearray(2 * BLOCK)
        file.seek(0)
        file.write(head)
        file.truncate(size)
    mount = retainzfs("mount", fresh.image, fresh.path, "--log", fresh.log)
    check = retainzfs("fsck", fresh.image)
    assert (mount.returncode, check.returncode) == (code, code)
    assert mount.stdout == ""
    assert message in mount.stderr
    # Damage is what a check is asked for; that there is nothing to check is an error.
    assert message in (check.stdout if code == 3 else check.stderr)
    assert [len(done.stderr.splitlines()) for done in (mount, check)] == [1, 1]
    assert mounts.find_mount(str(fresh.path)) is None
    assert fresh.image.stat().st_size == size
    with fresh.image.open("rb") as file:
        assert file.read(2 * BLOCK) == head, "a refusal changes nothing"


@pytest.mark.fuse
def test_mkfs_leaves_a_mounted_image_alone(fresh: Live) -> None:
    fresh.mount()
    (fresh.path / "file").write_bytes(b"content")
    done = retainzfs("mkfs", fresh.image, "--force")
    assert (done.returncode, done.stdout) == (1, "")
    assert "in use" in done.stderr
    fresh.umount()
    fresh.mount()
    assert (fresh.path / "file").read_bytes() == b"content"


@pytest.mark.fuse
def test_the_kernels_refusal_is_told(fresh: Live) -> None:
    """What libfuse says on standard error reaches the user, and the volume ends cleanly."""
    patch = "import pyfuse3\npyfuse3.default_options\n" \
        "from retainzfs import mounting\n" \
        "mounting._fuse_options = lambda mount: frozenset({'no_such_option'})"  # fmt: skip
    run = f"{patch}\nfrom retainzfs.cli import main\nraise SystemExit(main())"
    arguments = ["mount", str(fresh.image), str(fresh.path), "--log", str(fresh.log)]
    done = subprocess.run(
        [sys.executable, "-c", run, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no_such_option" in done.stderr
    fresh.mount()


# The daemon


@pytest.mark.fuse
def test_create_formats_only_what_is_missing(fresh: Live) -> None:
    image = fresh.path.parent / "made"
    for content in (b"first", b"second"):
        done = retainzfs(
            "mount", image, fresh.path, "--create", "--size", "64M", "--log", fresh.log
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        fresh.check()
        if content == b"second":
            assert (fresh.path / "file").read_bytes() == b"first"
        (fresh.path / "file").write_bytes(content)
        fresh.umount()
    assert image.stat().st_size == 64 << 20


@pytest.mark.fuse
def test_a_new_filesystem_belongs_to_who_made_it(fresh: Live) -> None:
    fresh.mount()
    assert fresh.path.stat().st_uid == os.geteuid()


@pytest.mark.fuse
def test_memory_can_be_mounted(fresh: Live) -> None:
    done = retainzfs("mount", "mem:64M", fresh.path, "--log", fresh.log)
    assert done.returncode == 0, done.stderr
    fresh.check()
    (fresh.path / "file").write_bytes(b"content")
    assert (fresh.path / "file").read_bytes() == b"content"


SLOW_END = """
import trio
from retainzfs.device.emulated import EmulatedDevice
close = EmulatedDevice.aclose
async def aclose(self):
    await trio.sleep(1)
    await close(self)
EmulatedDevice.aclose = aclose
"""


@pytest.mark.fuse
def test_mounting_right_after_unmounting(fresh: Live) -> None:
    """umount(8) does not wait for the daemon; the next mount does."""
    fresh.mount(patch=SLOW_END)
    (fresh.path / "file").write_bytes(os.urandom(8 << 20))
    unmounting.detach(str(fresh.path))
    fresh.mount()
    assert os.listdir(fresh.path) == ["file"]


@pytest.mark.fuse
def test_strange_names(fresh: Live) -> None:
    """A comma ends an option of libfuse; pyfuse3 takes ASCII only."""
    strange = fresh.path.parent / "a, b=ü\\c"
    fresh.image = fresh.image.rename(strange)
    fresh.path = fresh.path.rename(fresh.path.parent / "mount, point ü")
    fresh.mount()
    mount = mounts.find_mount(str(fresh.path))
    assert mount is not None
    assert mount.source == str(strange)
    fresh.umount()


@pytest.mark.fuse
def test_foreground_logs_to_the_terminal_and_ends_with_the_mount(fresh: Live) -> None:
    process = subprocess.Popen(
        [*COMMAND, "mount", str(fresh.image), str(fresh.path), "--foreground"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "mounted" in process.stderr.readline()
    fresh.check()
    assert fresh.pid == process.pid
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "unmounted" in said
    assert mounts.find_mount(str(fresh.path)) is None


@pytest.mark.fuse
def test_the_daemon_holds_neither_terminal_nor_directory(fresh: Live) -> None:
    fresh.mount()
    links = {
        fd: os.readlink(f"/proc/{fresh.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{fresh.pid}/fd")
    }
    assert links["0"] == links["1"] == os.devnull
    assert links["2"] == str(fresh.log)
    assert os.readlink(f"/proc/{fresh.pid}/cwd") == "/"
    assert os.getsid(fresh.pid) == fresh.pid


@pytest.mark.pure
def test_logs_have_a_name_for_each_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    path = mounting.log_path("/data/ckpt.img")
    assert path == tmp_path / "retainzfs" / "data-ckpt.img.log"
    assert mounting.log_path("mem:64M").name == "mem:64M.log"
    assert len(mounting.log_path("/deep" * 100).name) < 255
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert mounting.log_path("/dev/nvme0n1") == Path("/var/log/retainzfs/dev-nvme0n1.log")


# mount(8)


@pytest.fixture
def helper_link() -> Iterator[None]:
    """`mount -t retainzfs` finds the installed mount.py."""
    if os.geteuid() != 0:
        pytest.skip("only root can link /sbin/mount.retainzfs")
    script = Path(sys.executable).parent / "mount.py"
    assert script.exists(), "the package is not installed: pip install -e ."
    link = Path("/sbin/mount.retainzfs")
    if link.exists() or link.is_symlink():
        pytest.skip(f"{link} is already there")
    link.symlink_to(script)
    yield
    link.unlink()


@pytest.fixture
def fstab() -> Iterator[Path]:
    """/etc/fstab, restored afterwards."""
    path = Path("/etc/fstab")
    before = path.read_bytes() if path.exists() else None
    yield path
    if before is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(before)


def mount8(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["mount", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def usual_log(fresh: Live) -> Iterator[None]:
    """The helper logs to the usual place: look there, and take the file away."""
    fresh.log = mounting.log_path(str(fresh.image))
    yield
    fresh.clean_up()
    fresh.log.unlink()


@pytest.mark.fuse
@pytest.mark.usefixtures("helper_link", "usual_log")
def test_mount8_finds_the_helper(fresh: Live) -> None:
    options = "rw,noatime,commit=close,x-systemd.automount"
    done = mount8("-t", "retainzfs", str(fresh.image), str(fresh.path), "-o", options)
    assert done.returncode == 0, done.stderr
    fresh.check()
    assert 'commit = "close"' in (fresh.path / ".retainz/config.toml").read_text()
    (fresh.path / "file").write_bytes(b"content")
    assert subprocess.run(["umount", str(fresh.path)], check=False).returncode == 0
    fresh.mount()
    assert (fresh.path / "file").read_bytes() == b"content"


@pytest.mark.fuse
@pytest.mark.usefixtures("helper_link", "usual_log")
def test_a_line_in_fstab(fresh: Live, fstab: Path) -> None:
    line = f"{fresh.image} {fresh.path} retainzfs noauto,defaults,nofail,pool=32M 0 0\n"
    text = fstab.read_text() if fstab.exists() else ""
    fstab.write_text(text + line)
    done = mount8(str(fresh.path))
    assert done.returncode == 0, done.stderr
    fresh.check()
    assert "pool = 33554432" in (fresh.path / ".retainz/config.toml").read_text()


@pytest.mark.fuse
@pytest.mark.usefixtures("helper_link")
def test_mount8_hears_what_is_wrong(fresh: Live) -> None:
    done = mount8("-t", "retainzfs", "/nonexistent", str(fresh.path))
    assert done.returncode == mounting.HELPER_FAILED
    assert "no such target" in done.stderr
    mounting.log_path("/nonexistent").unlink()
    done = mount8("-t", "retainzfs", str(fresh.image), str(fresh.path), "-o", "bogus")
    assert done.returncode == mounting.HELPER_USAGE
    assert "bogus" in done.stderr


@pytest.mark.fuse
def test_the_helper_checks_only_when_told_so(
    fresh: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mounting.helper(["-f", str(fresh.image), str(fresh.path), "-o", "rw"]) == 0
    assert mounts.find_mount(str(fresh.path)) is None
    assert mounting.helper([str(fresh.image)]) == mounting.HELPER_USAGE
    assert "directory" in capsys.readouterr().err
