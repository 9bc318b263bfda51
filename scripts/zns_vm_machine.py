"""The virtual machine: QEMU's command line, and the loop that watches over it until it ends.

Everything between QEMU and this process goes through inherited descriptors (socket pairs, unlinked
images), so nothing has a name that could be left behind, and QEMU dies with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

from zns_vm_kernel import Kernel

QEMU = "qemu-system-x86_64"
CONSOLE_LINES = 30  # of the console, shown when the guest died
PR_SET_PDEATHSIG = 1
PORTS = ("init", "stdout", "stderr", "control")  # virtio-serial ports, each called zns-vm.NAME


class MachineError(Exception):
    """The machine, not the command in it, failed."""


class GaveUp(Exception):
    """The machine was stopped from outside; the script ends with this exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Namespace(NamedTuple):
    """An NVMe namespace; a conventional one has no zones."""

    size: int
    zone_size: int = 0
    zone_capacity: int = 0
    max_open: int = 0
    max_active: int = 0


class NullBlk(NamedTuple):
    """A zoned null_blk device, in memory; sizes in MiB."""

    size_mib: int
    zone_size_mib: int
    capacity_mib: int
    max_open: int
    max_active: int
    conventional_zones: int


@dataclass(frozen=True)
class Plan:
    """What to boot and what to run."""

    kernel: Kernel
    command: list[str]
    environment: dict[str, str]
    directory: Path
    kept: list[Path]  # what stays visible below the guest's temporary filesystems
    shared: Path
    zoned: list[Namespace]
    conventional: list[Namespace] = field(default_factory=list)
    null_blks: list[NullBlk] = field(default_factory=list)
    block_size: int = 4096
    modules: tuple[str, ...] = ()
    memory_mib: int = 2048
    cpus: int = 2
    timeout_s: float = 1800.0
    boots: int = 100
    console: Path | None = None
    cpu: str = "max"
    accelerator: str = "tcg,thread=multi"
    host_options: str = "msize=1048576,cache=loose"

    @property
    def namespaces(self) -> list[Namespace]:
        """Namespaces by number, from 1."""
        return self.zoned + self.conventional


def qemu_command(plan: Plan, ports: dict[str, int], images: list[int]) -> list[str]:
    """Return QEMU's command line, given the descriptors that it inherits."""
    command = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-M", "pc"]
    command += ["-accel", plan.accelerator, "-cpu", plan.cpu, "-smp", str(plan.cpus)]
    command += ["-m", f"{plan.memory_mib}M", "-kernel", str(plan.kernel.image)]
    command += ["-initrd", str(plan.kernel.initramfs)]
    # A panic must not reboot: the write pointers would go on, and so would the script.
    command += ["-append", "console=ttyS0 quiet panic=0 oops=panic mitigations=off nokaslr"]
    for name, number in ports.items():
        command += ["-chardev", f"socket,id={name},fd={number}"]
    command += ["-serial", "chardev:console", "-mon", "chardev=monitor,mode=control"]
    command += ["-device", "virtio-serial-pci"]
    for name in PORTS:
        command += ["-device", f"virtserialport,chardev={name},name=zns-vm.{name}"]
    for tag, path in (("host", Path("/")), ("shared", plan.shared)):
        command += [
            "-virtfs",
            f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap",
        ]
    command += ["-device", "nvme,serial=zns-vm,id=nvme"]
    for number, (namespace, image) in enumerate(zip(plan.namespaces, images, strict=True), start=1):
        command += ["-drive", f"file=/proc/self/fd/{image},if=none,id=ns{number},format=raw"]
        command += ["-device", namespace_device(number, namespace, plan.block_size)]
    return command


def namespace_device(number: int, namespace: Namespace, block_size: int) -> str:
    device = f"nvme-ns,drive=ns{number},bus=nvme,nsid={number}"
    device += f",logical_block_size={block_size},physical_block_size={block_size}"
    if namespace.zone_size:
        device += (
            f",zoned=true,zoned.zone_size={namespace.zone_size}"
            f",zoned.zone_capacity={namespace.zone_capacity}"
            f",zoned.max_open={namespace.max_open},zoned.max_active={namespace.max_active}"
        )
    return device


def job(plan: Plan, boot: int, end_mark: str) -> str:
    """Return the shell text that tells the guest's /init what to do in this boot."""
    first = len(plan.zoned) + 1
    conventional = range(first, first + len(plan.conventional))
    nulls = [f"/dev/nullb{number}" for number in range(len(plan.null_blks))]
    modules = plan.modules + (("configfs", "null_blk") if nulls else ())
    making = [
        f"null_blk {number} {' '.join(map(str, null))} {plan.block_size} || return 1"
        for number, null in enumerate(plan.null_blks)
    ]
    environment = plan.environment | {"ZNS_VM": "1", "ZNS_VM_BOOT": str(boot)}
    environment["ZNS_VM_SHARED"] = "/run/zns-vm/shared"
    environment["ZNS_VM_CONTROL"] = "/dev/virtio-ports/zns-vm.control"
    quoted = " ".join(shlex.quote(f"{name}={value}") for name, value in environment.items())
    kept = "".join(f"{path}\n" for path in plan.kept)
    devices = f'ZNS_VM_ZONED="$zoned" ZNS_VM_CONVENTIONAL="$conventional" {quoted}'
    return "\n".join(
        (
            f"host_options={shlex.quote(plan.host_options)}",
            f"modules={shlex.quote(' '.join(modules))}",
            f"zoned_nsids='{' '.join(map(str, range(1, first)))}'",
            f"conventional_nsids='{' '.join(map(str, conventional))}'",
            f"null_blks='{' '.join(nulls)}'",
            f"end_mark={shlex.quote(end_mark)}",
            f"printf %s {shlex.quote(kept)} >/kept-paths",
            "make_null_blks() {",
            *making,
            ":",
            "}",
            "run_command() {",
            f"exec setsid chroot /host /usr/bin/env -i --chdir={shlex.quote(str(plan.directory))} "
            f"{devices} {shlex.join(plan.command)}",
            "}",
            "",
        )
    )


class Machine:
    """A running QEMU with the ends of its ports; leaving the context ends it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sockets: dict[str, socket.socket] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Machine:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        passed: dict[str, int] = {}
        theirs: list[socket.socket] = []
        for name in (*PORTS, "console", "monitor"):
            ours, other = socket.socketpair()
            self.sockets[name] = self._stack.enter_context(ours)
            theirs.append(other)
            passed[name] = other.fileno()
        images = [self._image(namespace.size) for namespace in self.plan.namespaces]
        numbers = [image.fileno() for image in images]
        parent = os.getpid()

        def die_with_parent() -> None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        self.process = subprocess.Popen(
            qemu_command(self.plan, passed, numbers),
            stdin=subprocess.DEVNULL,
            pass_fds=[*passed.values(), *numbers],
            start_new_session=True,  # a terminal's ^C is for this script, which ends QEMU
            preexec_fn=die_with_parent,
        )
        self._stack.callback(self._end)
        for other in theirs:
            other.close()

    def _image(self, size: int) -> IO[bytes]:
        image = self._stack.enter_context(tempfile.TemporaryFile())
        image.truncate(size)
        return image

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()


class Watch:
    """Serves the machine's ports until the command has ended, and returns its exit code."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.plan = machine.plan
        self.boots = 0
        self.resets = 0
        self.code: int | None = None
        self.end_mark = f"zns-vm-end:{secrets.token_hex(16)}"
        self.outputs = {"stdout": Output(1, self.end_mark), "stderr": Output(2, self.end_mark)}
        self.console: deque[bytes] = deque(maxlen=CONSOLE_LINES)
        self.console_file: IO[bytes] | None = None
        self.partial = dict.fromkeys((*PORTS, "console", "monitor"), b"")
        self.reset_at: float | None = None
        self.waiting: deque[Callable[[Any], None]] = deque()  # for the monitor's answers

    def run(self) -> int:
        deadline = time.monotonic() + self.plan.timeout_s
        with selectors.DefaultSelector() as selector, ExitStack() as stack:
            if self.plan.console is not None:
                self.console_file = stack.enter_context(self.plan.console.open("wb"))
            for name, port in self.machine.sockets.items():
                selector.register(port, selectors.EVENT_READ, name)
            self.ask("qmp_capabilities", lambda _: None)
            while self.code is None or not all(o.ended for o in self.outputs.values()):
                now = time.monotonic()
                if now >= deadline:
                    raise GaveUp(124, f"timed out after {self.plan.timeout_s:g} s")
                if self.reset_at is not None and now >= self.reset_at:
                    self.reset_at = None
                    self.ask("system_reset", lambda _: None)
                until = min(deadline, self.reset_at or deadline)
                for key, _ in selector.select(until - now):
                    self.receive(key.data)
            return self.code

    def receive(self, name: str) -> None:
        try:
            data = self.machine.sockets[name].recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise MachineError(f"QEMU ended with exit code {self.machine.process.wait()}")
        if name in self.outputs:
            self.outputs[name].write(data)
            return
        if name == "console" and self.console_file is not None:
            self.console_file.write(data)
            self.console_file.flush()
        *lines, self.partial[name] = (self.partial[name] + data).split(b"\n")
        handle = {
            "console": self.on_console,
            "init": self.on_init,
            "control": self.on_control,
            "monitor": self.on_monitor,
        }[name]
        for line in lines:
            handle(line.rstrip(b"\r"))

    def on_console(self, line: bytes) -> None:
        self.console.append(line)
        if b"Kernel panic - not syncing" in line:
            raise MachineError("the guest's kernel panicked")

    def on_init(self, line: bytes) -> None:
        word, _, rest = line.decode(errors="replace").partition(" ")
        if word == "hello":
            if self.boots == self.plan.boots:
                raise MachineError(f"the guest booted more than {self.plan.boots} times")
            text = job(self.plan, self.boots, self.end_mark).encode()
            self.machine.sockets["init"].sendall(b"%d\n%b" % (len(text), text))
            self.boots += 1
        elif word == "exit":
            self.code = int(rest)
        elif word == "fail":
            raise MachineError(rest)

    def on_control(self, line: bytes) -> None:
        word, _, rest = line.decode(errors="replace").strip().partition(" ")
        if word == "reset":
            self.reset_at = time.monotonic() + float(rest or 0)

    def on_monitor(self, line: bytes) -> None:
        message = json.loads(line)
        if message.get("event") == "RESET":
            self.resets += 1
        elif "return" in message:
            self.waiting.popleft()(message["return"])
        elif "error" in message:
            raise MachineError(f"QEMU refused a request: {message['error']}")

    def ask(self, command: str, then: Callable[[Any], None]) -> None:
        self.waiting.append(then)
        self.machine.sockets["monitor"].sendall(json.dumps({"execute": command}).encode() + b"\n")


class Output:
    """One stream of the command's output, passed on to this process's own."""

    def __init__(self, descriptor: int, end_mark: str) -> None:
        self.descriptor = descriptor
        self.end_mark = end_mark.encode()
        self.held = b""  # what may be the beginning of the mark
        self.ended = False

    def write(self, data: bytes) -> None:
        data = self.held + data
        if data.endswith(self.end_mark):
            self.ended = True
            data, self.held = data.removesuffix(self.end_mark), b""
        else:
            size = len(data)
            for length in range(min(size, len(self.end_mark) - 1), 0, -1):
                if data.endswith(self.end_mark[:length]):
                    size -= length
                    break
            data, self.held = data[:size], data[size:]
        while data:
            data = data[os.write(self.descriptor, data) :]


def stop(number: int, frame: FrameType | None) -> None:
    raise GaveUp(128 + number, signal.Signals(number).name)
