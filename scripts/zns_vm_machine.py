"""A running QEMU, and the loop that serves its ports until the command in the guest has ended.

Everything between QEMU and this process goes through inherited descriptors (socket pairs, unlinked
images), so nothing has a name that could be left behind, and QEMU dies with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any, NamedTuple

from zns_vm_counts import Resets, counts
from zns_vm_kernel import Kernel
from zns_vm_plan import PORTS, Plan, job, qemu_command

CONSOLE_LINES = 30  # of the console, shown when the guest died
FALSE_STARTS = 5  # resets in a row without a guest that came up
PR_SET_PDEATHSIG = 1


class MachineError(Exception):
    """The machine, not the command in it, failed."""


class TimedOut(MachineError):
    """The command took longer than it may."""


class Outcome(NamedTuple):
    code: int  # the command's exit code
    counts: dict[str, Any]  # what the device has counted over all boots


class Machine:
    """QEMU and our ends of its ports; leaving the context ends it."""

    def __init__(self, plan: Plan, kernel: Kernel) -> None:
        self.plan = plan
        self.kernel = kernel
        self.sockets: dict[str, socket.socket] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Machine:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        theirs: dict[str, socket.socket] = {}
        for name in (*PORTS, "console", "monitor", "trace"):
            ours, other = socket.socketpair()
            self.sockets[name] = stack.enter_context(ours)
            theirs[name] = stack.enter_context(other)
        trace = theirs.pop("trace")
        ports = {name: other.fileno() for name, other in theirs.items()}
        images = []
        for namespace in self.plan.namespaces:
            image = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            image.truncate(namespace.size)
            images.append(image.fileno())
        parent = os.getpid()

        def die_with_parent() -> None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        self.process = subprocess.Popen(
            qemu_command(self.plan, self.kernel, ports, images),
            stdin=subprocess.DEVNULL,
            stdout=trace.fileno(),
            stderr=trace.fileno(),
            pass_fds=[*ports.values(), *images],
            start_new_session=True,  # a terminal's ^C is for this process, which ends QEMU
            preexec_fn=die_with_parent,  # noqa: PLW1509 - there are no threads here
        )
        stack.callback(self._end)
        for other in (*theirs.values(), trace):
            other.close()  # so that QEMU's end can be seen

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()


class Watch:
    """Serves the machine's ports until the command has ended."""

    def __init__(self, machine: Machine) -> None:
        self.plan = machine.plan
        self.machine = machine
        self.console: deque[str] = deque(maxlen=CONSOLE_LINES)
        self._console_file: IO[str] | None = None
        self._selector = selectors.DefaultSelector()
        self._deadline = time.monotonic() + self.plan.timeout_s
        self._end_mark = f"zns-vm-end:{secrets.token_hex(16)}"
        self._outputs = {"stdout": Output(1, self._end_mark), "stderr": Output(2, self._end_mark)}
        self._partial: dict[str, bytes] = {}
        self._answers: deque[Callable[[Any], None]] = deque()  # that the monitor owes
        self._resets = Resets()
        self._reset_at: float | None = None
        self._false_starts = 0
        self._boots = 0
        self._code: int | None = None

    def run(self) -> Outcome:
        """Serve until the command has ended and all its output has been passed on."""
        counted: list[dict[str, Any]] = []
        with self._selector, ExitStack() as stack:
            if self.plan.console is not None:
                self._console_file = stack.enter_context(self.plan.console.open("w"))
            for name, port in self.machine.sockets.items():
                self._selector.register(port, selectors.EVENT_READ, name)
            self._ask("qmp_capabilities", lambda _: None)
            while self._code is None or not all(o.ended for o in self._outputs.values()):
                self._step()
            self._ask_counts(counted.append)
            while not counted:
                self._step()
        return Outcome(self._code, counted[0])

    def _step(self) -> None:
        now = time.monotonic()
        if now >= self._deadline:
            raise TimedOut(f"timed out after {self.plan.timeout_s:g} s")
        if self._reset_at is not None and now >= self._reset_at:
            self._reset_at = None
            self._ask("system_reset", lambda _: None)
        until = self._deadline if self._reset_at is None else self._reset_at
        for key, _ in self._selector.select(min(until, self._deadline) - now):
            self._receive(key.data)

    def _receive(self, name: str) -> None:
        data = self._read(name)
        if name in self._outputs:
            self._outputs[name].write(data)
            return
        *lines, self._partial[name] = (self._partial.get(name, b"") + data).split(b"\n")
        handle = {
            "console": self._on_console,
            "init": self._on_init,
            "control": self._on_control,
            "monitor": self._on_monitor,
            "trace": self._on_trace,
        }[name]
        for line in lines:
            handle(line.decode(errors="replace").rstrip("\r"))

    def _read(self, name: str) -> bytes:
        try:
            data = self.machine.sockets[name].recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            if name != "trace":
                self._drain_trace()  # what QEMU has to say about its end
            code = self.machine.process.wait()
            raise MachineError(f"the machine is gone: QEMU ended with exit code {code}")
        return data

    def _drain_trace(self) -> None:
        """Read what QEMU has written so far."""
        port = self.machine.sockets["trace"]
        port.setblocking(False)
        try:
            while True:
                self._receive("trace")
        except BlockingIOError:
            port.setblocking(True)

    def _on_console(self, line: str) -> None:
        self.console.append(line)
        if self._console_file is not None:
            print(line, file=self._console_file, flush=True)
        if "Kernel panic - not syncing" in line:
            raise MachineError("the guest's kernel panicked")

    def _on_init(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "hello":
            self._booted()
        elif word == "exit":
            self._code = int(rest)
        elif word == "fail":
            raise MachineError(rest)

    def _booted(self) -> None:
        if self._boots == self.plan.boots:
            raise MachineError(f"the guest booted more than {self.plan.boots} times")
        for output in self._outputs.values():
            output.restart()
        self._partial.pop("control", None)
        self._reset_at = None  # it was meant for the boot before
        text = job(self.plan, self._boots, self._end_mark).encode()
        self.machine.sockets["init"].sendall(b"%d\n%b" % (len(text), text))
        self._boots += 1
        self._false_starts = 0

    def _on_control(self, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        if word == "reset":
            try:
                self._reset_at = time.monotonic() + float(rest or 0)
            except ValueError:
                self._answer({"error": f"not a number of seconds: {rest}"})
        elif word == "counts":
            self._ask_counts(lambda counted: self._answer({"request": rest, **counted}))
        else:
            self._answer({"error": f"neither `reset [SECONDS]` nor `counts [WORD]`: {line}"})

    def _answer(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode() + b"\n"
        try:
            self.machine.sockets["control"].sendall(text, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise MachineError("the guest does not read what it asks for") from None

    def _ask_counts(self, then: Callable[[dict[str, Any]], None]) -> None:
        def answered(blockstats: list[Any]) -> None:
            self._drain_trace()
            zoned, namespaces = len(self.plan.zoned), len(self.plan.namespaces)
            then(counts(blockstats, self._resets, zoned, namespaces))

        self._ask("query-blockstats", answered)

    def _ask(self, command: str, then: Callable[[Any], None]) -> None:
        self._answers.append(then)
        self.machine.sockets["monitor"].sendall(json.dumps({"execute": command}).encode() + b"\n")

    def _on_monitor(self, line: str) -> None:
        message = json.loads(line)
        if "return" in message:
            self._answers.popleft()(message["return"])
        elif "error" in message:
            raise MachineError(f"QEMU refused a request: {message['error']}")
        elif message.get("event") == "RESET":
            self._false_starts += 1
            if self._false_starts > FALSE_STARTS:
                raise MachineError("the guest resets before it comes up")

    def _on_trace(self, line: str) -> None:
        if not self._resets.read(line):
            print(line, file=sys.stderr)


class Output:
    """One stream of the command's output, passed on to this process's own."""

    def __init__(self, descriptor: int, end_mark: str) -> None:
        self.ended = False
        self._descriptor = descriptor
        self._end_mark = end_mark.encode()
        self._held = b""  # what may be the beginning of the mark

    def write(self, data: bytes) -> None:
        data = self._held + data
        self._held = b""
        if data.endswith(self._end_mark):
            self.ended = True
            self._pass_on(data.removesuffix(self._end_mark))
            return
        for length in range(min(len(data), len(self._end_mark) - 1), 0, -1):
            if data.endswith(self._end_mark[:length]):
                self._held = data[-length:]
                break
        self._pass_on(data[: len(data) - len(self._held)])

    def restart(self) -> None:
        """Begin again after a reset, which may have cut off anything."""
        self._pass_on(self._held)
        self._held = b""
        self.ended = False

    def _pass_on(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]
