"""The native engine for trio tasks: submit, sleep, wake with the result.

A task that waits for I/O cannot be cancelled: its buffer belongs to a thread until the request is
done. A cancellation is delivered at the task's next checkpoint.
"""

from collections.abc import Callable

import outcome
import trio

from retainzfs._zio import Engine, Slot
from retainzfs.device.protocol import Sums

WRITERS = 4  # threads that append; a zone has always the same, which keeps its order
READERS = 4
COMMANDS = 4  # threads for zone commands, of which a zone has one at a time

Result = tuple[int, bytes, int]  # errno or 0, sums, trailer's sum or first bad block
Memory = memoryview | Slot
Callback = Callable[[int], None]


def _refuse(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


async def _result() -> Result:
    result: Result = await trio.lowlevel.wait_task_rescheduled(_refuse)
    return result


class Ticket:
    """The result of an append that was submitted.

    `ended` gets the errno or 0 at once, in the order in which the appends of a zone have ended; the
    tasks that await `sums` are woken in any order.
    """

    __slots__ = ("_ended", "_result", "_task")

    def __init__(self, ended: Callback | None = None) -> None:
        self._ended = ended
        self._result: Result | None = None
        self._task: trio.lowlevel.Task | None = None

    def set(self, result: Result) -> None:
        self._result = result
        if self._ended is not None:
            self._ended(result[0])
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)

    async def sums(self) -> Sums:
        if self._result is None:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(_refuse)
        assert self._result is not None, "a task is woken by its result"
        error, sums, trailer = self._result
        _check(error)
        return Sums(sums, trailer)


class AsyncEngine:
    """I/O on file descriptors; every method raises OSError with the host's errno."""

    def __init__(self, writers: int = WRITERS, readers: int = READERS) -> None:
        # An engine of one thread is a queue: what it is given runs in order.
        self._queues = [Engine(1, 1) for _ in range(writers)]
        self._engine = Engine(1, readers)  # flushes and reads, which wait for no append
        self._commands = Engine(COMMANDS, 1)  # of zones, and discards: some take a second
        self._scopes: list[trio.CancelScope] = []
        self._stopped = trio.Event()
        self._running = 0
        self._idle = trio.Event()
        for engine in self._engines():
            self._running += 1
            self._scopes.append(trio.CancelScope())
            trio.lowlevel.spawn_system_task(self._deliver, engine, self._scopes[-1])

    def _engines(self) -> list[Engine]:
        return [*self._queues, self._engine, self._commands]

    def append(
        self,
        fd: int,
        offset: int,
        data: Memory,
        header: bytes = b"",
        zone: int = 0,
        ended: Callback | None = None,
    ) -> Ticket:
        """Submit an append; those of one zone run, and end, in the order of the calls."""
        ticket = Ticket(ended)
        queue = self._queues[zone % len(self._queues)]
        queue.submit_append(ticket, fd, offset, data, header)
        return ticket

    async def flush(self, fd: int) -> None:
        self._engine.submit_flush(trio.lowlevel.current_task(), fd)
        _check((await _result())[0])

    async def read(self, fd: int, offset: int, buffer: Memory, sums: bytes = b"") -> int:
        """Fill the buffer; returns the index of the first bad block, or -1."""
        self._engine.submit_read(trio.lowlevel.current_task(), fd, offset, buffer, sums)
        error, _, bad = await _result()
        _check(error)
        return bad

    def discard(
        self, callback: Callback, fd: int, offset: int, length: int, *, device: bool
    ) -> None:
        """Discard behind the caller's back; `callback` gets the errno or 0."""
        self._commands.submit_discard(callback, fd, offset, length, device)

    async def command(self, fd: int, request: int, offset: int, length: int) -> None:
        """Do with the zones of a range what `_zio.RESET_ZONE` and the like ask for."""
        task = trio.lowlevel.current_task()
        self._commands.submit_command(task, fd, request, offset, length)
        _check((await _result())[0])

    async def aclose(self) -> None:
        """Wait for everything submitted, stop the threads."""
        with trio.CancelScope(shield=True):
            while any(engine.pending for engine in self._engines()):
                self._idle = trio.Event()
                await self._idle.wait()
            for scope in self._scopes:
                scope.cancel()
            await self._stopped.wait()
        self.close()

    def close(self) -> None:
        """Stop the threads after the trio run has ended; nobody waits for results any more."""
        for engine in self._engines():
            engine.close()

    async def _deliver(self, engine: Engine, scope: trio.CancelScope) -> None:
        try:
            with scope:
                while True:
                    await trio.lowlevel.wait_readable(engine.fileno())
                    self._dispatch(engine)
        finally:
            self._running -= 1
            if not self._running:
                self._stopped.set()

    def _dispatch(self, engine: Engine) -> None:
        for token, error, sums, value in engine.completions():
            if isinstance(token, Ticket):
                token.set((error, sums, value))
            elif isinstance(token, trio.lowlevel.Task):
                trio.lowlevel.reschedule(token, outcome.Value((error, sums, value)))
            else:
                token(error)
        if not engine.pending:
            self._idle.set()


def _check(error: int) -> None:
    if error:
        raise OSError(error, "")
