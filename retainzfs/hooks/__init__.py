"""Ready-made hooks for training frameworks; each module imports its framework, this one none.

A hook gives advice: where it cannot, as on another filesystem, it warns once and training goes on.
"""

import contextlib
import warnings
from collections.abc import Iterator

from retainzfs.errors import RetainzError

_warned: set[type[RetainzError]] = set()


@contextlib.contextmanager
def advice() -> Iterator[None]:
    """Let the block end at what the filesystem does not take, with one warning of each kind.

    An OSError goes on: then the save itself is not safe.
    """
    try:
        yield
    except RetainzError as error:
        if type(error) not in _warned:
            _warned.add(type(error))
            warnings.warn(f"no retention hints: {error}", RuntimeWarning, stacklevel=3)
