"""Ready-made hooks for training frameworks; each module imports its framework, this one none.

A hook gives advice. What the filesystem cannot take or does not permit, and another filesystem,
end the advice with one warning, and training goes on. Any other OSError is raised: then the save
itself is not safe.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

from retainzfs import hints
from retainzfs.asking import AnyPath
from retainzfs.errors import NotRetainzfs, RetainzError

_warned: set[type[Exception]] = set()


@contextlib.contextmanager
def advice() -> Iterator[None]:
    """Do what is inside as far as the filesystem takes it; warn once of each kind of refusal."""
    try:
        yield
    except (RetainzError, PermissionError) as error:
        if type(error) not in _warned:
            _warned.add(type(error))
            warnings.warn(f"no retention hints: {error}", RuntimeWarning, stacklevel=3)


def keep(directory: AnyPath, count: int) -> None:
    """Say that the newest `count` in a directory are kept, unless something else is said already.

    The directory is made; on another filesystem nothing is.
    """
    with advice():
        if not hints.is_retainzfs(directory):
            raise NotRetainzfs(os.fspath(directory))
        os.makedirs(directory, exist_ok=True)
        if not {"keep_last", "anchor", "retire"} & hints.explain(directory).attributes.keys():
            hints.set(directory, keep_last=count)


def committed(path: AnyPath) -> None:
    """Say that a generation is complete, if it is there; return when it is durable."""
    with advice():
        if os.path.exists(path):
            hints.commit(path)


def anchored(before: set[str], now: set[str]) -> None:
    """Keep from retirement what is in `now`, and no longer what was so only `before`."""
    with advice():
        for path in filter(os.path.exists, before - now):
            hints.clear(path, "anchor")
        for path in filter(os.path.exists, now - before):
            hints.set(path, anchor=True)
