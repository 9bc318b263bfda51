"""For training code: say what shall be kept, that a save is complete, and wait until it is durable.

A path on anything but a mounted retainzfs raises NotRetainzfs, a bad value BadAttribute, both from
`retainzfs.errors`; everything else that goes wrong is the OSError of the call that failed. Sizes
are bytes, times seconds, epochs the seconds that the volume has been mounted so far. The attributes
and their inheritance are described in docs/attributes.md.

Importing this costs little: neither FUSE nor trio nor any framework comes with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import xattr

from retainzfs import asking, lifetimes
from retainzfs.asking import AnyPath
from retainzfs.errors import (
    BadAttribute,
    IncompleteGeneration,
    NoGeneration,
    NotRetainzfs,
    NotYet,
)
from retainzfs.lifetimes import ATTRIBUTES, PREFIX, Durability, FileClass

__all__ = [
    "Attributes",
    "Explanation",
    "FileClass",
    "Generation",
    "Stated",
    "clear",
    "commit",
    "explain",
    "generation",
    "generations",
    "get",
    "is_retainzfs",
    "set",
    "wait_durable",
]

SWITCHES = ("anchor", "reap")
POLL_MIN_S = 0.005
POLL_MAX_S = 0.5


@dataclass(frozen=True, slots=True)
class Attributes:
    """What is set on a path itself, None where nothing is: what `set` takes, parsed."""

    keep_last: int | None = None
    cadence: float | None = None
    """Seconds."""
    keep_every: int | None = None
    anchor: bool | None = None
    birth: float | None = None
    """Epoch."""
    retire: float | None = None
    """Epoch; math.inf: never."""
    size: int | None = None
    """Bytes."""
    file_class: FileClass | None = None
    reap: bool | None = None
    commit: Durability | None = None
    """`close`, `fsync`, or seconds between commits."""


@dataclass(frozen=True, slots=True)
class Stated:
    """An attribute that holds for a path, and the path below the mount that it was set on."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What holds for a path, and why. Paths begin at the mount's root, as `/run1/step-5`."""

    path: str
    file_class: FileClass
    attributes: Mapping[str, Stated] = field(hash=False)
    """By the names of `lifetimes.Policy`: `keep_last`, `cadence_s`, ..."""
    layout: str | None
    """Whose naming the path follows; None when it names no generation."""
    stream: str | None
    """Directory of the stream."""
    generation: int | None
    """Number; None while nothing has been written of it."""
    state: str | None
    """`writing`, `complete` or `incomplete`."""
    birth_epoch: float | None
    retire_epoch: float | None
    """None: never for an anchor, unknown otherwise."""
    anchor: bool
    origin: str
    """What decided on the retirement, in words."""
    reason: str | None
    """Why it is incomplete, where that is known."""
    presumed: bool
    """`complete` only as far as this mount can see: for its own space, and for nothing else."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A row of the table of generations; `path` begins at the mount's root."""

    number: int
    path: str
    state: str
    """`writing`, `complete`, `incomplete` or `retired`."""
    size: int
    birth_epoch: float
    retire_epoch: float | None
    anchor: bool
    origin: str
    reason: str | None
    """Why it is incomplete, where that is known."""
    presumed: bool
    """As in `Explanation`."""
    zones: tuple[int, ...]


def is_retainzfs(path: AnyPath) -> bool:
    """Whether a path is on a mounted retainzfs, or would be if it existed."""
    try:
        asking.computed(_existing(path), "explain")
    except NotRetainzfs:
        return False
    return True


def set(
    path: AnyPath,
    *,
    keep_last: int | str | None = None,
    cadence: float | str | None = None,
    keep_every: int | str | None = None,
    anchor: bool | str | None = None,
    birth: float | str | None = None,
    retire: float | str | None = None,
    size: int | str | None = None,
    file_class: FileClass | str | None = None,
    reap: bool | str | None = None,
    commit: Durability | str | None = None,
) -> None:
    """Set attributes of a file, or of a directory and so of all below it: all of them, or none.

    None leaves an attribute as it is. Texts are accepted as `setfattr` has them: `cadence="30m"`,
    `size="8G"`. Numbers are seconds for `cadence` and `commit`, bytes for `size`, epochs for
    `birth` and `retire`. `commit` is the durability policy; that a generation is complete says the
    function `commit`.

    Raises BadAttribute before anything is changed, NotRetainzfs, OSError.
    """
    given = {
        "keep_last": keep_last,
        "cadence": cadence,
        "keep_every": keep_every,
        "anchor": anchor,
        "birth": birth,
        "retire": retire,
        "size": size,
        "class": file_class,
        "reap": reap,
        "commit": f"{_text(commit)}s" if type(commit) in (int, float) else commit,
    }
    _set(path, _checked(given))


def get(path: AnyPath) -> Attributes:
    """Return what is set on a path itself, without what it inherits. Raises as `set` does."""
    asking.computed(path, "explain")
    found: dict[str, Any] = {}
    for attribute in ATTRIBUTES.values():
        value = asking.attribute(path, attribute.name) if attribute.field else None
        if value is not None:
            with contextlib.suppress(BadAttribute, NotYet):  # a newer version's value
                found[_parameter(attribute.name)] = lifetimes.parse(attribute.name, value)
    return Attributes(**found)


def clear(path: AnyPath, *names: str) -> None:
    """Remove attributes of a path, called as in `Attributes`; without names, all that are ours.

    One that is not set is passed over. Raises BadAttribute for a name that does not exist.
    """
    asking.computed(path, "explain")
    wanted = {lifetimes.settable("class" if name == "file_class" else name).name for name in names}
    # Not the package's list: it fails on names of other programs that are no UTF-8.
    for full in os.listxattr(path):
        if full.startswith(PREFIX) and (not names or full.removeprefix(PREFIX) in wanted):
            with asking.naming(path):
                xattr.removexattr(path, full)


def explain(path: AnyPath) -> Explanation:
    """Return what holds for a path, and where that comes from. Raises NotRetainzfs, OSError."""
    told = asking.computed(path, "explain")
    told["file_class"] = FileClass(told["class"])
    stated = {n: Stated(a["value"], a["from"]) for n, a in told["attributes"].items()}
    told["attributes"] = stated
    return Explanation(**{f.name: told[f.name] for f in fields(Explanation)})


def generations(path: AnyPath) -> list[Generation]:
    """Return the generations of the streams at and below a directory, by stream and number.

    Raises NotRetainzfs, OSError.
    """
    rows = [row | {"zones": tuple(row["zones"])} for row in asking.generations(path)]
    return [Generation(**{f.name: row[f.name] for f in fields(Generation)}) for row in rows]


def commit(path: AnyPath) -> None:
    """Declare the generation that a path belongs to complete; return when it is durable.

    The word of the caller goes before what the filesystem has seen, a failed write included: call
    it when every process that saves into this mount is done. Raises NoGeneration, NotRetainzfs,
    OSError.
    """
    told = explain(path)
    try:
        with asking.naming(path):
            xattr.setxattr(path, PREFIX + "commit", b"1")
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise NoGeneration(os.fspath(path), told.origin) from None
        raise


def wait_durable(path: AnyPath, timeout: float | None = None) -> None:
    """Return when the generation that a path belongs to is complete, and durable as such.

    The path need not exist yet, as when another thread or process is about to save, but it must
    name a generation in a directory that does. What is complete only as far as this mount can see
    is not: there somebody must `commit` it. `timeout` is in seconds; the last flush of the device
    may go beyond it.

    Raises IncompleteGeneration when the save has failed, TimeoutError, NoGeneration, NotRetainzfs,
    FileNotFoundError when the generation was deleted meanwhile, OSError when the device fails.
    """
    deadline_s = None if timeout is None else time.monotonic() + timeout
    pause_s = POLL_MIN_S
    begun = False
    while True:
        told = _begun(path) if not begun else explain(path)
        begun = told is not None
        state = "not begun" if told is None else "presumed" if told.presumed else told.state
        if state in ("complete", "retired"):
            break
        if told is not None and state == "incomplete":
            reason = told.reason or "the reason is not known"
            raise IncompleteGeneration(os.fspath(path), told.generation, reason)
        left_s = pause_s if deadline_s is None else deadline_s - time.monotonic()
        if left_s <= 0:
            text = f"not durable after {timeout:g} s, but {state}"
            raise TimeoutError(errno.ETIMEDOUT, text, os.fspath(path))
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, POLL_MAX_S)
    _fsync(_member(Path(path)))


@contextlib.contextmanager
def generation(
    path: AnyPath, *, size: int | str | None = None, anchor: bool | None = None
) -> Iterator[Path]:
    """Save one generation: `with generation(run / "step-1000", size="8G") as directory: ...`

    Makes the directory, or for a name of a single file (`step-1000.pt`) the one that it goes into;
    which of them, the name or what is there already tells. `size` is what is about to be written,
    bytes; for a single file it is set on the directory of the stream. `anchor` keeps this
    generation for ever. At the end the generation is declared complete, and durable. After an
    exception it is not, what was written stays, and the older generations are as they were.

    Raises BadAttribute, NotRetainzfs, NoGeneration before anything is changed or made; OSError.
    """
    path = Path(path)
    sized = _checked({"size": size})
    anchored = _checked({"anchor": anchor})
    match = _named_by(path)
    if path.is_dir() or (match.is_directory and not path.exists()):
        path.mkdir(parents=True, exist_ok=True)
        _set(path, sized | anchored)
        anchored = {}
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        _set(path.parent, sized)
    yield path
    _set(path, anchored)
    commit(path)


# Beneath


def _parameter(name: str) -> str:
    return "file_class" if name == "class" else name


def _text(value: object) -> str:
    """`value` as an attribute has it; what cannot be one is for `lifetimes.parse` to refuse."""
    if isinstance(value, FileClass):
        return str(value.value)
    # Attributes have no more decimals than nanoseconds.
    return f"{value:.9f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _checked(given: Mapping[str, object]) -> dict[str, bytes]:
    """Return the values to be stored, those that are not None. Raises BadAttribute, NotYet."""
    values: dict[str, bytes] = {}
    for name, value in given.items():
        if value is None:
            continue
        text = str(int(value)) if isinstance(value, bool) and name in SWITCHES else _text(value)
        values[name] = text.encode("utf-8", "surrogateescape")
        if isinstance(lifetimes.parse(name, values[name]), lifetimes.Act):
            what = f"{text!r} is no policy; hints.commit() says that a generation is complete"
            raise BadAttribute(PREFIX + name, what, "close, fsync, or a duration (5s, 1m)")
    return values


def _set(path: AnyPath, values: Mapping[str, bytes]) -> None:
    """Set checked values: all of them, or none."""
    if not values:
        return
    asking.computed(path, "explain")  # other filesystems would store what they do not understand
    before = {name: asking.attribute(path, name) for name in values}
    tried: list[str] = []
    try:
        for name, value in values.items():
            tried.append(name)
            with asking.naming(path):
                xattr.setxattr(path, PREFIX + name, value)
    except OSError as error:
        for name in tried[:-1]:
            _put_back(path, name, before[name])
        if error.errno != errno.EINVAL:
            raise
        name = tried[-1]
        what = (
            f"{values[name].decode()!r} was refused for {os.fspath(path)}; the mount's log says why"
        )
        raise BadAttribute(PREFIX + name, what, ATTRIBUTES[name].accepted) from None


def _put_back(path: AnyPath, name: str, value: bytes | None) -> None:
    with contextlib.suppress(OSError):  # the error that brought us here says more
        if value is None:
            xattr.removexattr(path, PREFIX + name)
        else:
            xattr.setxattr(path, PREFIX + name, value)


def _existing(path: AnyPath) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    whole = Path(os.path.abspath(path))
    return next(p for p in (whole, *whole.parents) if p.exists())


def _named_by(path: AnyPath) -> lifetimes.Match:
    """Return the generation that a path names, which need not exist.

    Raises NoGeneration when it names none or lies inside one, NotRetainzfs, OSError.
    """
    whole = Path(os.path.abspath(path))
    base = _existing(whole.parent)
    told = asking.computed(base, "explain")
    inside = [*told["path"].split("/"), *whole.relative_to(base).parts]
    names = [os.fsencode(name) for name in inside if name]
    match = lifetimes.recognise(names, _knows(told, len(names) - 1))
    if match is None:
        raise NoGeneration(os.fspath(path), "its name has no number")
    if match.depth != len(names) - 1:
        outer = os.fsdecode(names[match.depth])
        raise NoGeneration(os.fspath(path), f"of its own; it lies inside {outer}")
    return match


def _knows(told: Mapping[str, Any], last: int) -> lifetimes.Knows:
    """Whose bare numbers are generations: where keep_last is set on the directory itself."""
    stated = told["attributes"].get("keep_last", {})
    declared = stated.get("from") == told["path"] or "glob" in stated
    return lambda depth, series: declared and depth == last and lifetimes.usual_series(series)


def _begun(path: AnyPath) -> Explanation | None:
    """Return what holds for a path that belongs to a generation; None before its first byte."""
    try:
        told = explain(path)
    except FileNotFoundError:
        asking.computed(Path(os.path.abspath(path)).parent, "explain")
        _named_by(path)
        return None
    if told.generation is None and told.layout is None:
        raise NoGeneration(os.fspath(path), told.origin)
    return None if told.generation is None else told


def _member(path: Path) -> Path:
    """Return a file of a generation, given by itself or its directory."""
    if not path.is_dir():
        return path
    found = (Path(top, name) for top, _, names in os.walk(path) for name in names)
    return next((file for file in found if not file.is_symlink()), path)


def _fsync(path: Path) -> None:
    """Return when a file is durable, and with it the state that its generation counts in."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
