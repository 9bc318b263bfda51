"""The native engine for trio tasks: submit, sleep, wake with the result.

A task that waits for I/O cannot be cancelled: its buffer belongs to a thread until the request is
done. A cancellation is delivered at the task's next checkpoint.
"""

from collections.abc import Callable

import outcome
import trio

from retainzfs._zio import Engine, Slot
from retainzfs.device.protocol import Sums

WRITERS = 8  # one write in flight a zone, and at most 8 zones open by default
READERS = 4

Result = tuple[int, bytes, int]  # errno or 0, sums, trailer's sum or first bad block
Memory = memoryview | Slot
Callback = Callable[[int], None]


def _refuse(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


async def _result() -> Result:
    result: Result = await trio.lowlevel.wait_task_rescheduled(_refuse)
    return result


class AsyncEngine:
    """I/O on file descriptors; every method raises OSError with the host's errno."""

    def __init__(self, writers: int = WRITERS, readers: int = READERS) -> None:
        self._engine = Engine(writers, readers)
        self._scope = trio.CancelScope()
        self._stopped = trio.Event()
        self._idle = trio.Event()
        trio.lowlevel.spawn_system_task(self._deliver)

    async def append(self, fd: int, offset: int, data: Memory, header: bytes = b"") -> Sums:
        self._engine.submit_append(trio.lowlevel.current_task(), fd, offset, data, header)
        error, sums, trailer = await _result()
        _check(error)
        return Sums(sums, trailer)

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
        self._engine.submit_discard(callback, fd, offset, length, device)

    async def aclose(self) -> None:
        """Wait for everything submitted, stop the threads."""
        with trio.CancelScope(shield=True):
            while self._engine.pending:
                self._idle = trio.Event()
                await self._idle.wait()
            self._scope.cancel()
            await self._stopped.wait()
        self._engine.close()

    def close(self) -> None:
        """Stop the threads after the trio run has ended; nobody waits for results any more."""
        self._engine.close()

    async def _deliver(self) -> None:
        try:
            with self._scope:
                while True:
                    await trio.lowlevel.wait_readable(self._engine.fileno())
                    self._dispatch()
        finally:
            self._stopped.set()

    def _dispatch(self) -> None:
        for token, *result in self._engine.completions():
            if isinstance(token, trio.lowlevel.Task):
                trio.lowlevel.reschedule(token, outcome.Value(tuple(result)))
            else:
                token(result[0])
        if not self._engine.pending:
            self._idle.set()


def _check(error: int) -> None:
    if error:
        raise OSError(error, "")
