"""What happens at each boot of a machine that is reset in the middle of saves.

`python -m tests.reboots JOB REBOOTS SEED` runs in a guest of scripts/zns-vm, once a boot; scripts/
reboots starts it. Every boot but the first checks the volume on the first zoned device: fsck, every
promise that was made to a program before the reset, what counts as complete, our view of the zones
against the device's. Every boot but the last lets programs save until the machine is reset, at a
moment drawn from the seed, by the kernel (sysrq-b) or from outside.

What the programs were promised is written to a directory of the host that is not cached in the
guest, so that it outlives the reset.

What such a reset shows: nothing that was only in the guest's memory is needed (page cache, staging,
the daemon's state), writes and zone commands in flight may end in any way, and order and flushes
are right as far as the device's zones tell. What it cannot show: the loss of a device's volatile
cache. The emulated drive's data and write pointers are in the host's memory and survive the reset,
flushed or not. scripts/crash loses such caches, in simulation.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from retainzfs import fsck, mkfs, mounting, unmounting
from tests import programs, zonereport
from tests.promises import History

ROOT: Final = Path("/tmp/reboots")  # of the guest, gone at every reset: the mount
START_MAX_S: Final = 120.0  # until every program has been promised something
LIFE_MAX_S: Final = 10.0  # from then on
DEAD_S: Final = 60.0  # the reset must have come


@dataclass
class State:
    """What is handed on from boot to boot."""

    boot: int = 0  # the one that comes next
    by_kernel: int = 0  # resets
    history: dict[str, Any] = field(default_factory=dict)


class Job(Protocol):
    def check(self, history: History) -> list[str]:
        """Return what is wrong on the mount beside broken promises."""

    def start(self, records: Path, seed: str) -> dict[int, str]:
        """Fork processes that save; return what each is called, which is its record's name."""


class Programs:
    """Small files, renames, logs, maps, deletions, generations of one and of several files."""

    def check(self, history: History) -> list[str]:
        return programs.unfinished(ROOT, history)

    def start(self, records: Path, seed: str) -> dict[int, str]:
        started = programs.start(ROOT, records, seed)
        return {child: program.__name__ for child, program in started.items()}


class Boot:
    def __init__(self, job: Job, reboots: int, seed: int) -> None:
        self.job = job
        self.reboots = reboots
        self.number = int(os.environ["ZNS_VM_BOOT"])
        self.rng = random.Random(f"{seed} {self.number}")
        self.seed = f"{seed}, boot {self.number}"
        self.target = os.environ["ZNS_VM_ZONED"].split()[0]
        self.shared = Path(os.environ["ZNS_VM_SHARED"])
        self.log = self.shared / f"log-{self.number}"
        self.state = State()
        self.history = History(ROOT)

    def run(self) -> list[str]:
        """Return what is wrong; does not return when the machine is reset."""
        began = time.monotonic()
        ROOT.mkdir()
        scrubbed = self._prepare()
        if isinstance(scrubbed, list):
            return scrubbed
        self._mount()
        wrong = self._compare()
        print(
            f"boot {self.number}: {self.history.promised} acknowledged,"
            f" {len(self.history.allowed)} pieces compared, {self.history.compared} bytes of them"
            f" as they were promised, {scrubbed} bytes scrubbed,"
            f" {time.monotonic() - began:.1f} s; {len(wrong)} violations",
            flush=True,
        )
        if wrong:
            return wrong
        if self.number < self.reboots:
            return self._save_until_reset()
        unmounting.umount(str(ROOT))
        report = in_child(lambda: fsck.check(self.target, scrub=True).as_dict())
        print(
            f"reboots: {self.reboots}, {self.state.by_kernel} of them by the kernel;"
            f" acknowledged: {self.history.promised}; violations: {len(report['findings'])}",
            flush=True,
        )
        return [finding["text"] for finding in report["findings"]]

    def _prepare(self) -> int | list[str]:
        """Format at the first boot, check at the others: bytes that were verified, or damage."""
        if not self.number:
            in_child(lambda: mkfs.make(self.target, force=True).zone_count)
            return 0
        self.state = State(**json.loads((self.shared / "state").read_text()))
        if self.state.boot != self.number:
            return [f"boot {self.number}: the machine has rebooted by itself"]
        self.history = History.from_json(ROOT, self.state.history)
        self.history.read(*sorted(self._records(self.number - 1).iterdir()))
        report = in_child(lambda: fsck.check(self.target, scrub=True).as_dict())
        in_child(lambda: zonereport.check_target(self.target))
        damages = [finding["text"] for finding in report["findings"] if finding["damage"]]
        return damages or int(report["scrubbed"])

    def _mount(self) -> None:
        options = mounting.parse_options([])
        mounting.mount_daemon(
            mounting.Mount(self.target, str(ROOT), options, log_file=str(self.log))
        )

    def _compare(self) -> list[str]:
        logs = (self.shared / f"log-{number}" for number in range(self.number + 1))
        lines = [line for log in logs for line in log.read_text().splitlines()]
        loud = [line for line in lines if " ERROR " in line or " CRITICAL " in line]
        zonereport.check_mount(ROOT)
        return loud + self.history.compare() + self.job.check(self.history)

    def _save_until_reset(self) -> list[str]:
        """Return only what keeps the reset from coming."""
        records = self._records(self.number)
        records.mkdir()
        by_kernel = self.rng.random() < 0.5
        self._hand_on(by_kernel)
        children = self.job.start(records, self.seed)
        deadline = time.monotonic() + START_MAX_S
        while not all(has_begun(records / name) for name in children.values()):
            if time.monotonic() > deadline:
                return [f"seed {self.seed}: a program saved nothing in {START_MAX_S:g} s"]
            if gone := ended(children):
                return [f"seed {self.seed}: {gone}"]
            time.sleep(0.1)
        life_s = self.rng.uniform(0, LIFE_MAX_S)
        if not by_kernel:
            Path(os.environ["ZNS_VM_CONTROL"]).write_text(f"reset {life_s}\n")
            life_s += DEAD_S
        end = time.monotonic() + life_s
        while time.monotonic() < end:
            if gone := ended(children):
                return [f"seed {self.seed}: {gone}"]
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))
        if by_kernel:
            Path("/proc/sysrq-trigger").write_text("b")
        return [f"seed {self.seed}: the machine was not reset"]

    def _hand_on(self, by_kernel: bool) -> None:
        self.state = State(
            self.number + 1, self.state.by_kernel + by_kernel, self.history.to_json()
        )
        beside = self.shared / "state.new"
        with beside.open("w") as file:
            json.dump(asdict(self.state), file)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(self.shared / "state")

    def _records(self, boot: int) -> Path:
        return self.shared / f"records-{boot}"


def has_begun(record: Path) -> bool:
    return record.exists() and b'["did"' in record.read_bytes()


def ended(children: dict[int, str]) -> str:
    """Say which process has ended, a program or the daemon, if one has."""
    child, status = os.waitpid(-1, os.WNOHANG)
    if not child:
        return ""
    name = children.get(child, "the daemon")
    return f"{name} ended with {os.waitstatus_to_exitcode(status)} before the reset"


def in_child(work: Callable[[], Any]) -> Any:
    """Do something in a process of its own: this one stays free of threads, for it forks on."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(work(), pipe)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "a check or a format has failed; its error is above"
    return json.loads(told)


def main() -> int:
    job, reboots, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jobs: dict[str, Callable[[], Job]] = {"programs": Programs}
    wrong = Boot(jobs[job](), reboots, seed).run()
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
