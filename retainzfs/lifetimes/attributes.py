"""The `user.retainz.*` attributes: names, values, and how they add up along a path.

An attribute is stored as the bytes that the user set; `parse` is both the check when it is set and
the reading when it is used. `resolve` walks from a file to the root: per attribute the nearest one
wins.

`commit` has two meanings, split by value. `1` is an act, "this generation is complete": it is done,
not stored. `close`, `fsync` and a duration are the durability policy, stored like any other; a
policy of one second is written `1s`. The mount option of the same name knows only the policy
(`parse_durability`), so there `1` is a second.
"""

import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from retainzfs.errors import BadAttribute, NotYet
from retainzfs.lifetimes.units import DURATION_ACCEPTED, SIZE_ACCEPTED, parse_duration, parse_size

PREFIX = "user.retainz."

NUMBER_MAX = 2**63 - 1
"""Generation numbers and counts are signed 64-bit on the medium."""

VALUE_LENGTH_MAX = 64
"""No accepted value is longer (bytes); more is refused unread."""

CADENCES_MAX = 100
"""A stated retirement farther away than so many cadences is taken for a training step."""


class FileClass(enum.Enum):
    """What may happen to the bytes of a file."""

    CHECKPOINT = "checkpoint"
    CACHE = "cache"
    SCRATCH = "scratch"
    OUTPUT = "output"


class Act(enum.Enum):
    """What setting an attribute does when it is an order and not a policy; never stored."""

    COMPLETE = "commit"
    COLLECT = "gc"


@dataclass(frozen=True, slots=True)
class ScrubOrder:
    """Verify every checksum now; `rate` in bytes a second, None the usual one, 0 ends it."""

    rate: int | None


Durability: TypeAlias = Literal["close", "fsync"] | float
"""When written data are durable: at close, at fsync, or in the background every so many seconds."""

Value: TypeAlias = int | float | bool | FileClass | Durability | Act | ScrubOrder


class Access(enum.Enum):
    """Who sets an attribute."""

    OWNER = "whoever may write the file"
    ADMIN = "root or the mounting user"
    COMPUTED = "nobody: the filesystem computes it"
    LATER = "nobody: this version does not have it"


def _whole(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,19}", text) is None or not 1 <= int(text) <= NUMBER_MAX:
        raise ValueError("is not a whole number from 1 to 2^63-1")
    return int(text)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("is neither 0 nor 1")
    return text == "1"


def _epoch(text: str) -> float:
    # float() alone would also take nan, 1_000 and digits of other scripts.
    if re.fullmatch(r"[+-]?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", text) is None:
        raise ValueError("is not a number")
    if abs(float(text)) > NUMBER_MAX:
        raise ValueError("is too large")
    return float(text)


def _retire(text: str) -> float:
    return math.inf if text == "inf" else _epoch(text)


def _cadence(text: str) -> float:
    seconds = parse_duration(text)
    if seconds == 0:
        raise ValueError("is no time at all")
    return seconds


def _file_class(text: str) -> FileClass:
    return FileClass(text)


def parse_durability(text: str) -> Durability:
    """The `commit` policy (mount option): `close`, `fsync` or the seconds between commits.

    ValueError for anything else.
    """
    if text == "close":
        return "close"
    return "fsync" if text == "fsync" else _cadence(text)


def _commit(text: str) -> Act | Durability:
    return Act.COMPLETE if text == "1" else parse_durability(text)


def _collect(text: str) -> Act:
    if text != "1":
        raise ValueError("is not 1")
    return Act.COLLECT


def _scrub(text: str) -> ScrubOrder:
    if text in ("start", "stop"):
        return ScrubOrder(None if text == "start" else 0)
    rate = parse_size(text)
    if rate == 0:
        raise ValueError("is no rate at all")
    return ScrubOrder(rate)


def _no_value(text: str) -> Value:
    raise AssertionError(f"an attribute that cannot be set was parsed: {text!r}")


@dataclass(frozen=True, slots=True)
class Attribute:
    """One row of the table: `accepted` is for messages, `field` the one of Policy that it sets."""

    name: str
    accepted: str
    parser: Callable[[str], Value] = _no_value
    field: str = ""
    access: Access = Access.OWNER


_COUNT = "a whole number >= 1"
_SWITCH = "0 or 1"

ATTRIBUTES: Mapping[str, Attribute] = {
    attribute.name: attribute
    for attribute in (
        Attribute("keep_last", _COUNT, _whole, "keep_last"),
        Attribute("cadence", DURATION_ACCEPTED + ", more than 0", _cadence, "cadence_s"),
        Attribute("keep_every", _COUNT, _whole, "keep_every"),
        Attribute("anchor", _SWITCH, _switch, "anchor"),
        Attribute("birth", "a number (epoch)", _epoch, "birth"),
        Attribute("retire", "a number (epoch) or inf", _retire, "retire"),
        Attribute("size", SIZE_ACCEPTED, parse_size, "size"),
        Attribute("class", "checkpoint, cache, scratch or output", _file_class, "file_class"),
        Attribute("reap", _SWITCH, _switch, "reap"),
        Attribute(
            "commit",
            "1 (this generation is complete), close, fsync, or a duration (5s, 1m)",
            _commit,
            "commit",
        ),
        Attribute("gc", "1 (reclaim now)", _collect, access=Access.ADMIN),
        Attribute(
            "scrub",
            "start, stop, or the bytes a second at which to start (100M)",
            _scrub,
            access=Access.ADMIN,
        ),
        *(
            Attribute(name, "nothing, it can only be read", access=Access.COMPUTED)
            for name in (
                "state",
                "stream",
                "generation",
                "generations",
                "history",
                "hint",
                "explain",
                "zones",
                "extents",
                "checksum",
                "published",
            )
        ),
        *(
            Attribute(name, "nothing yet", access=Access.LATER)
            for name in (
                "publish",
                "quota",
                "reserve",
                "stream_name",
                "cache_entry",
                "sha256",
                "source",
                "version",
            )
        ),
    )
}
"""Every name under `user.retainz.`, without that prefix."""


def is_ours(name: bytes) -> bool:
    """Whether an extended attribute of this name is for us, not just stored."""
    return name.startswith(PREFIX.encode())


def _short(name: str | bytes) -> str:
    text = name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name
    return text.removeprefix(PREFIX)


def settable(name: str | bytes) -> Attribute:
    """The table's row for `name` (with or without the prefix), if users may set or remove it.

    BadAttribute when the name is unknown or read-only, NotYet when a later version will have it.
    Whether this user may is for the caller: see `Attribute.access`.
    """
    short = _short(name)
    attribute = ATTRIBUTES.get(short)
    if attribute is None:
        known = ", ".join(a.name for a in ATTRIBUTES.values() if a.field)
        raise BadAttribute(PREFIX + short, "there is no such attribute", known)
    if attribute.access is Access.COMPUTED:
        what = "is computed by the filesystem and cannot be set"
        raise BadAttribute(PREFIX + short, what, attribute.accepted)
    if attribute.access is Access.LATER:
        raise NotYet(PREFIX + short)
    return attribute


def parse(name: str | bytes, value: bytes) -> Value:
    """The value of attribute `name` (with or without `user.retainz.`), typed.

    An `Act` is to be done at once and not stored. BadAttribute when the name is unknown or
    read-only or the value is not accepted, NotYet for what a later version will have.
    """
    attribute = settable(name)
    full = PREFIX + attribute.name
    if len(value) > VALUE_LENGTH_MAX:
        raise BadAttribute(full, f"a value of {len(value)} bytes is too long", attribute.accepted)
    text = value.decode("utf-8", "backslashreplace").strip()
    try:
        return attribute.parser(text)
    except ValueError as error:
        # Our parsers say "is not ..."; the messages of units and enum name the value themselves.
        reason = str(error) if str(error).startswith("is ") else "is not accepted"
        raise BadAttribute(full, f"{text!r} {reason}", attribute.accepted) from error


@dataclass(frozen=True, slots=True)
class Policy:
    """What the attributes along a path say together; None where none says anything.

    `cadence_s` is in seconds, `birth` and `retire` in epochs, `size` in bytes. `origins` gives for
    each field that was stated the index in the chain of the attribute that won.
    """

    keep_last: int | None = None
    cadence_s: float | None = None
    keep_every: int | None = None
    anchor: bool | None = None
    birth: float | None = None
    retire: float | None = None
    size: int | None = None
    file_class: FileClass = FileClass.CHECKPOINT
    reap: bool = False
    commit: Durability | None = None
    origins: Mapping[str, int] = field(default_factory=dict, hash=False)

    def nearer(self, one: str, other: str) -> bool:
        """Whether field `one` was stated strictly nearer to the file than field `other`."""
        if one not in self.origins:
            return False
        return other not in self.origins or self.origins[one] < self.origins[other]


def resolve(chain: Sequence[Mapping[bytes, bytes]]) -> Policy:
    """The policy from the extended attributes of a file and its ancestors, nearest first.

    Each mapping is as stored: full name to value; names that are not ours are passed over. What
    should come after the root's attributes (the mount's configuration) is one more mapping.
    """
    values: dict[str, Any] = {}
    origins: dict[str, int] = {}
    for index, attributes in enumerate(chain):
        for name, text in attributes.items():
            if not is_ours(name):
                continue
            try:
                value = parse(name, text)
            except (BadAttribute, NotYet):
                # It was checked when it was set, so a newer version stored it. Not understanding a
                # hint costs placement quality; refusing to open the file would cost the data.
                continue
            target = ATTRIBUTES[_short(name)].field
            if target and target not in values and not isinstance(value, Act | ScrubOrder):
                values[target] = value
                origins[target] = index
    return Policy(**values, origins=origins)


def check_retire(retire: float, now: float, cadence_s: float | None) -> None:
    """BadAttribute when a stated retirement epoch is too far away to be meant as an epoch.

    The usual mistake is to state a training step. `retire` and `now` are epochs of the mount's
    timeline, `cadence_s` the stream's seconds between saves, None while it is unknown (then nothing
    can be said).
    """
    if cadence_s is None or not math.isfinite(retire) or retire - now <= CADENCES_MAX * cadence_s:
        return
    raise BadAttribute(
        PREFIX + "retire",
        f"{retire:g} is more than {CADENCES_MAX} cadences of {cadence_s:g} s away; it is an epoch "
        f"of the mount's timeline (now {now:g}), no training step",
        ATTRIBUTES["retire"].accepted + "; keep_last says it without epochs",
    )
