"""Real mounts for tests: a daemon started by the command, always unmounted, its log looked at."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

from retainzfs import mkfs, mounts, unmounting
from retainzfs.errors import RetainzError
from retainzfs.volume import Options
from tests import helpers, simulation
from tests.witness import WatchedDevice

settings.register_profile("nightly", print_blob=True)  # tests that know it draw far more examples

IMAGE_SIZE = 256 << 20  # bytes; sparse
COMMAND = (sys.executable, "-m", "retainzfs")
SLOW = 10.0 if "ZNS_VM" in os.environ else 1.0  # an emulated machine is slower by this
PATIENCE_S = 20.0 * SLOW  # for what takes well under a second on an idle machine
COMMAND_S = 60.0 * SLOW


def retainzfs(*arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    """Run the command and return what it did, whatever that was."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


class Live:
    """A target and a directory where it is, or can be, mounted."""

    def __init__(self, base: Path, size: int = IMAGE_SIZE, zone_size: int | None = None) -> None:
        self.base = base
        self.image = base / "image"
        self.path = base / "mount"
        self.log = base / "log"
        self.path.mkdir()
        self.expected: list[str] = []  # patterns of ERROR lines that the test provokes
        self.format(size, zone_size)

    def format(self, size: int, zone_size: int | None = None) -> None:
        mkfs.make(str(self.image), size=size, zone_size=zone_size, force=True)

    def mount(self, options: str = "", patch: str = "") -> None:
        """Mount with the command. `patch` is Python that runs in the daemon before that."""
        run = [sys.executable, "-c", f"{patch}\nfrom retainzfs.cli import main\nmain()"]
        arguments = ["mount", str(self.image), str(self.path), "--log", str(self.log)]
        arguments += ["-o", options] if options else []
        subprocess.run(
            [*(run if patch else COMMAND), *arguments],
            check=True,
            timeout=COMMAND_S,
        )
        self.check()

    def umount(self) -> None:
        unmounting.umount(str(self.path))

    @property
    def pid(self) -> int:
        told = json.loads((self.path / ".retainz/stats.json").read_bytes())
        return int(told["pid"])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon and return when it has ended."""
        pid = self.pid
        daemon = os.pidfd_open(pid)
        os.kill(pid, number)
        unmounting.wait(daemon, PATIENCE_S)
        os.close(daemon)

    def check(self) -> None:
        """The path is the mount; on the bare directory most tests would pass as well."""
        mount = mounts.find_mount(str(self.path))
        assert mount is not None, f"nothing is mounted on {self.path}"
        assert mount.fstype == mounts.FSTYPE, f"{mount.fstype} is mounted on {self.path}"
        assert os.stat(self.path).st_dev != os.stat(self.path.parent).st_dev

    def complaints(self) -> list[str]:
        """Return the log's lines about errors that no test announced."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        loud = [line for line in lines if re.search(r" (ERROR|CRITICAL) |Traceback", line)]
        return [line for line in loud if not any(re.search(e, line) for e in self.expected)]

    def clean_up(self) -> None:
        """Unmount, by force if need be."""
        if mounts.find_mount(str(self.path)) is None:
            return
        with contextlib.suppress(RetainzError):
            self.umount()
            return
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        unmounting.detach(str(self.path), lazy=True)
        raise AssertionError(f"{self.path} had to be unmounted by force")


L = TypeVar("L", bound=Live)


def living(
    size: int = IMAGE_SIZE, zone_size: int | None = None
) -> contextlib.AbstractContextManager[Live]:
    return looked_after(lambda base: Live(base, size, zone_size))


@contextlib.contextmanager
def looked_after(make: Callable[[Path], L]) -> Iterator[L]:
    """Make it in a directory of its own; at the end unmount it, and look at its log."""
    # Not pytest's tmp_path: nobody else may look into that, and some tests are somebody else.
    with tempfile.TemporaryDirectory(prefix="retainzfs-test-") as base:
        Path(base).chmod(0o755)
        live = make(Path(base))
        try:
            yield live
        finally:
            live.clean_up()
            if complaints := live.complaints():
                print(live.log.read_text())  # pytest shows it when the test or this has failed
        assert not complaints, "the daemon's log has errors that no test announced"


@pytest.fixture(scope="session")
def shared_mount() -> Iterator[Live]:
    """One mount for all tests that do not care what else is on it."""
    with living() as live:
        live.mount("allow_other" if os.geteuid() == 0 else "")
        yield live


@pytest.fixture
def live(shared_mount: Live) -> Iterator[Live]:
    """The shared mount, checked before and after, with the log of this test looked at."""
    shared_mount.check()
    before = len(shared_mount.complaints())
    yield shared_mount
    shared_mount.check()
    assert not shared_mount.complaints()[before:], "the daemon logged errors"


@pytest.fixture
def room(live: Live, request: pytest.FixtureRequest) -> Path:
    """An empty directory of its own on the shared mount."""
    name = re.sub(r"\W+", "_", request.node.name)
    directory = live.path / f"{request.node.path.stem}.{name}"
    directory.mkdir()
    return directory


@pytest.fixture
def fresh() -> Iterator[Live]:
    """A formatted target of its own; the test mounts it, kills it, mounts it again."""
    with living() as live:
        yield live


@pytest.fixture
def clock() -> helpers.Clock:
    """The time of a volume on a device in memory."""
    return helpers.Clock()


@pytest.fixture
def mount(clock: helpers.Clock) -> Options:
    """How such a volume is mounted, again and again with the time going on."""
    return helpers.options(clock)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return when something is true that the daemon does by itself: of this the kernel has no
    event, inotify(7) included."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def as_user(uid: int, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code as another user; skips the test where we cannot become one."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    become = f"import os; os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n"
    return run_python(become + code)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with the arguments in `sys.argv[1:]`."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


@pytest.fixture(autouse=True)
def power_cuts(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the marker `power_cuts(N)`: behind the test, cut the power at N random moments of what
    it did on devices of `helpers.small_device`, and check what comes back."""
    marker = request.node.get_closest_marker("power_cuts")
    if marker is None:
        yield
        return
    devices: list[WatchedDevice] = []
    helpers.watching = devices
    yield
    helpers.watching = None
    seed = request.config.getoption("--power-cut-seed")
    seed = zlib.crc32(request.node.nodeid.encode()) if seed is None else seed
    for device in devices:
        violations = simulation.cut(device, seed, moments=marker.args[0])
        assert not violations, f"--power-cut-seed {seed}:\n" + "\n".join(violations)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without zoned block devices skip the tests that need one, and say how to get them."""
    if os.environ.get("ZNS_VM_ZONED"):
        return
    reason = "needs zoned block devices: scripts/zns-vm -- scripts/test -m zoned"
    for item in items:
        if "zoned" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of the moments that are drawn for tests with the marker power_cuts"
    parser.addoption("--power-cut-seed", type=int, metavar="SEED", help=text)
