"""The configuration file of a mount (TOML): its options, and policies for directories by glob.

    [mount]
    commit = "close"

    [[stream]]
    path = "run*/checkpoints"
    keep_last = 3

Nothing is read or written here: text goes in, text comes out. What a table of the file says about a
directory is one more mapping of attributes for `lifetimes.resolve`, behind those of the root.
"""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

from retainzfs import lifetimes, placement
from retainzfs.errors import BadConfig, UsageError
from retainzfs.lifetimes import ATTRIBUTES, PREFIX
from retainzfs.lifetimes.units import DURATION_ACCEPTED, SIZE_ACCEPTED

POOL_MIN = 16 << 20  # bytes; four runs of staging, fewer than two writers need

Scalar: TypeAlias = str | int | float | bool

_TYPES: Mapping[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a float",
    bool: "a boolean",
    list: "an array",
    dict: "a table",
}


@dataclass(frozen=True, slots=True)
class MountTable:
    """`[mount]`: what the options of the same names say; None for what is not stated.

    `commit` in seconds where it is a number, `pool` in bytes.
    """

    commit: lifetimes.Durability | None = None
    policy: str | None = None
    pool: int | None = None
    allow_other: bool | None = None

    def stated(self) -> dict[str, Scalar]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StreamTable:
    """One `[[stream]]`: a glob, the values as they stand in the file, and as attributes."""

    path: str
    values: Mapping[str, Scalar]
    attributes: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Config:
    mount: MountTable = MountTable()
    streams: tuple[StreamTable, ...] = ()


# Globs


class Glob:
    """A pattern for paths of directories, from the mount's root: `*`, `?` and `[...]` stay within a
    name, `**` in place of a name stands for any number of directories. `/` is the root.

    ValueError for what is no such pattern.
    """

    def __init__(self, text: str) -> None:
        inner = text.removeprefix("/").removesuffix("/")
        if not text:
            raise ValueError("is empty; '/' is the mount's root")
        self._parts = [_component(part) for part in inner.split("/")] if inner else []

    def depths(self, names: Sequence[str]) -> Iterator[int]:
        """Yield how many of the names, from the root, make a path that matches, fewest first."""
        places = self._reached({0})
        for depth in range(len(names) + 1):
            if len(self._parts) in places:
                yield depth
            if depth < len(names):
                places = self._reached(set(self._after(places, names[depth])))

    def _after(self, places: set[int], name: str) -> Iterator[int]:
        for place in places - {len(self._parts)}:
            part = self._parts[place]
            if part is None:
                yield place
            elif part.match(name):
                yield place + 1

    def _reached(self, places: set[int]) -> set[int]:
        """`**` stands for no directory, too."""
        for place in range(len(self._parts)):
            if place in places and self._parts[place] is None:
                places.add(place + 1)
        return places


def _component(part: str) -> re.Pattern[str] | None:
    """Compile one name of a glob; None for `**`."""
    if part == "**":
        return None
    if part in ("", ".", ".."):
        raise ValueError("has a part that is empty, '.' or '..'")
    if "**" in part:
        raise ValueError("has ** beside something else; it stands for whole directories")
    if "[" in re.sub(r"\[!?+\]?+[^\]]*\]", "", part):
        raise ValueError("has a [ without its ]; the character itself is [[]")
    return re.compile(fnmatch.translate(part))


class Configured:
    """What the `[[stream]]` tables of a mount say about its directories."""

    def __init__(self, streams: Sequence[StreamTable] = ()) -> None:
        self._streams = [(Glob(table.path), table) for table in streams]

    def of(self, components: Sequence[bytes]) -> tuple[StreamTable, ...]:
        """Return the tables that hold for a directory, the one that wins first.

        A glob holds for what it matches and everything below. The directory that is matched nearest
        wins, and of one directory the table that comes last in the file.
        """
        names = _text(components)
        found = []
        for index, (glob, table) in enumerate(self._streams):
            depth = max(glob.depths(names), default=-1)
            if depth >= 0:
                found.append((depth, index, table))
        return tuple(table for _, _, table in sorted(found, key=lambda f: f[:2], reverse=True))

    def declares(self, components: Sequence[bytes]) -> bool:
        """Whether a glob matches the directory itself."""
        names = _text(components)
        return any(len(names) in glob.depths(names) for glob, _ in self._streams)


def _text(components: Sequence[bytes]) -> list[str]:
    return [name.decode("utf-8", "surrogateescape") for name in components]


# Reading


class _Key(NamedTuple):
    """What a key takes: the types of TOML, the words for messages, and the reader of its text."""

    types: tuple[type, ...]
    accepted: str
    reader: Callable[[str], object]


def mount_value(name: str, text: str) -> Scalar:
    """Read the mount option `name` that has a value. Raises ValueError or UsageError."""
    if name == "commit":
        return lifetimes.parse_durability(text)
    if name == "policy":
        placement.policy(text)
        return text
    pool = lifetimes.parse_size(text)
    if pool < POOL_MIN:
        raise ValueError(f"the least is {lifetimes.format_size(POOL_MIN)}")
    return pool


def _option(name: str, accepted: str, *types: type) -> _Key:
    return _Key(types, accepted, lambda text: mount_value(name, text))


def _attribute(name: str, *types: type) -> _Key:
    return _Key(types, ATTRIBUTES[name].accepted, ATTRIBUTES[name].parser)


_DURABILITY = "close, fsync, or " + DURATION_ACCEPTED
_POOL = f"at least {lifetimes.format_size(POOL_MIN)}: {SIZE_ACCEPTED}"
_SWITCH = _Key((bool,), "true or false", str)

_MOUNT: Mapping[str, _Key] = {
    "commit": _option("commit", _DURABILITY, str, int, float),
    "policy": _option("policy", ", ".join(placement.policies()), str),
    "pool": _option("pool", _POOL, int, str),
    "allow_other": _SWITCH,
}
# Not birth and retire: they are of one generation. Not commit=1: it is an act, so 1 is a second.
_STREAM: Mapping[str, _Key] = {
    "keep_last": _attribute("keep_last", int),
    "cadence": _attribute("cadence", str, int, float),
    "keep_every": _attribute("keep_every", int),
    "anchor": _SWITCH,
    "size": _attribute("size", int, str),
    "class": _attribute("class", str),
    "reap": _SWITCH,
    "commit": _Key((str, int, float), _DURABILITY, lifetimes.parse_durability),
}


def parse(text: str, name: str) -> Config:
    """Read a configuration; `name` is the file's, for messages. Raises BadConfig."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConfig(name, f"not TOML: {error}") from error
    if unknown := tables.keys() - {"mount", "stream"}:
        raise BadConfig(name, f"unknown key {min(unknown)!r}; known: [mount] and [[stream]]")
    mount, streams = tables.get("mount", {}), tables.get("stream", [])
    if not isinstance(mount, dict):
        raise BadConfig(name, f"mount is {_type(mount)}; write [mount]")
    if not isinstance(streams, list) or not all(isinstance(table, dict) for table in streams):
        raise BadConfig(name, f"stream is {_type(streams)}; write [[stream]]")
    return Config(
        MountTable(**_read(mount, _MOUNT, f"{name}: [mount]")),
        tuple(_stream(table, f"{name}: [[stream]] {i}") for i, table in enumerate(streams, 1)),
    )


def _stream(table: dict[str, Any], where: str) -> StreamTable:
    values = dict(table)
    path = values.pop("path", None)
    if not isinstance(path, str):
        what = "path is missing" if path is None else f"path is {_type(path)}"
        raise BadConfig(where, f"{what}; accepted: a glob such as 'run*/checkpoints'")
    try:
        Glob(path)
    except ValueError as error:
        raise BadConfig(where, f"path: {path!r} {error}") from error
    _read(values, _STREAM, f"{where} ({path!r})", "path")
    attributes = {
        (PREFIX + key).encode(): _as_attribute(key, value).encode() for key, value in values.items()
    }
    return StreamTable(path, values, attributes)


def _read(
    table: dict[str, Any], keys: Mapping[str, _Key], where: str, *others: str
) -> dict[str, Any]:
    """Check the keys and values of a table; return what the values mean."""
    for name in table:
        if name not in keys:
            known = ", ".join((*others, *keys))
            raise BadConfig(where, f"unknown key {name!r}; known: {known}")
    return {name: _value(name, value, keys[name], where) for name, value in table.items()}


def _value(name: str, value: Any, key: _Key, where: str) -> object:
    if type(value) not in key.types:
        raise BadConfig(where, f"{name} is {_type(value)}; accepted: {key.accepted}")
    if isinstance(value, bool):
        return value
    try:
        return key.reader(_plain(value))
    except (ValueError, UsageError) as error:
        # As of attributes: what does not begin so repeats what is accepted.
        reason = str(error) if str(error).startswith("is ") else "is not accepted"
        what = f"{name}: {_plain(value)[:40]!r} {reason}"
        raise BadConfig(where, f"{what}; accepted: {key.accepted}") from error


def _type(value: object) -> str:
    return _TYPES.get(type(value), "a date or time")


def _plain(value: Scalar) -> str:
    """Return a value as the text of an attribute or of a mount option."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")  # no exponent
    return str(value).strip()


def _as_attribute(name: str, value: Scalar) -> str:
    text = _plain(value)
    return text + "s" if name == "commit" and text[-1].isdigit() else text


# Writing


def dump(config: Config) -> str:
    """Return the text of a configuration; `parse` reads the same from it."""
    lines = ["[mount]", *_lines(config.mount.stated())]
    for table in config.streams:
        lines += ["", "[[stream]]", *_lines({"path": table.path, **table.values})]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Scalar]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in values.items()]


def _toml(value: Scalar) -> str:
    # JSON's strings, numbers and booleans are TOML's, but for a character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
