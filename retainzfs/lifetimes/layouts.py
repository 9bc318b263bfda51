"""Which generation a path belongs to, read from the names that training frameworks give.

Nothing here is needed for correctness: a name that merely looks like a generation costs placement
quality, never data. Two names are left alone on purpose: a directory called by a bare number or by
any word and a number (`7`, `run_3`) is more often an experiment than a checkpoint. They count where
somebody knows better: `recognise` asks its caller about each name with a number that no layout has.
Of Orbax, which calls its steps so, the temporary name is recognised everywhere, and `Match.final`
tells what it becomes.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from retainzfs.lifetimes.attributes import NUMBER_MAX
from retainzfs.lifetimes.markers import EXTENSION, NAMES_KEPT, Layout, is_tracker


@dataclass(frozen=True, slots=True)
class Match:
    """A path component that names a generation.

    `stem` is `final` without what changes from one generation to the next: the shards of a stream
    that keeps several files a generation (`model-5.pt`, `opt-5.pt`) have each the same stem every
    time, and one number together. `final` is the name after the rename that completes a temporary
    one, else the name itself.
    """

    depth: int
    """Index of the component."""
    layout: Layout
    number: int
    temporary: bool
    """Not complete until it is renamed."""
    is_directory: bool
    """Certain when components follow; else what this layout usually makes."""
    stem: bytes
    final: bytes
    usual: bool = True
    """A layout has such names; else somebody knew this one."""

    @property
    def series(self) -> bytes:
        """What is the same in all names of one job: the stem without shard and rank."""
        if self.layout is Layout.ORBAX:
            return self.stem + BARE  # as its final names are known by
        shard = _SHARD.get(self.layout)
        return self.stem if shard is None else shard.sub(b"", self.stem)


class _Named(NamedTuple):
    layout: Layout
    digits: bytes
    is_directory: bool
    stem: bytes


_WORDS = rb"(?:checkpoint|ckpt|global[-_]?step|step|iteration|iter|epoch)"

# Layouts whose directories have one fixed form.
_DIRECTORIES = tuple(
    (layout, re.compile(rb"(%s)([0-9]+)" % prefix, re.IGNORECASE))
    for layout, prefix in (
        (Layout.TORCHTITAN, rb"step-"),
        (Layout.MEGATRON, rb"iter_(?=[0-9]{7})"),
        (Layout.HUGGINGFACE, rb"checkpoint-"),
        (Layout.DEEPSPEED, rb"global_step"),
        (Layout.NUMBERED, _WORDS + rb"[-_=]?"),
    )
)
_COMPOSER = re.compile(rb"ep[0-9]+-ba([0-9]+)((?:-rank[0-9]+)?(?:\.pt)?)")
_TENSORFLOW = re.compile(rb"(.+-)([0-9]+)(\.index|\.meta|\.data-[0-9]+-of-[0-9]+)", re.DOTALL)
_TENSORFLOW_TEMPORARY = re.compile(rb"(?:.*\.)?(?:ckpt|model)-[0-9]+", re.DOTALL)
_ORBAX = re.compile(rb"((?:.*_)?)([0-9]+)", re.DOTALL)

# One of several files of a generation, each by another process: step-5-rank0.pt.
_OF_RANK = (
    rb"[-_.](?:rank|shard|part|worker|mp_rank|dp_rank|tp|pp|dp)[-_]?[0-9]+(?:[-_]of[-_][0-9]+)?"
)
_RANK = re.compile(_OF_RANK + rb"\Z", re.IGNORECASE)

# What tells the files of one generation apart, in their stems.
_SHARD = {
    Layout.PLAIN: re.compile(_OF_RANK + rb"(?=\.[^.]+(?:\.tar)?\Z)", re.IGNORECASE),
    Layout.TENSORFLOW: re.compile(rb"(?:\.index|\.meta|\.data-[0-9]+-of-[0-9]+)\Z"),
    Layout.COMPOSER: re.compile(rb"(?:-rank[0-9]+)?(?:\.pt)?\Z"),
}

# Lightning and NeMo: metric=value pairs. The number is a step before an epoch, and no decimal.
_STEP = re.compile(rb"(?:^|[-_])(?:step|iteration|iter)=([0-9]+)(?![0-9.])")
_EPOCH = re.compile(rb"(?:^|[-_])epoch=([0-9]+)(?![0-9.])")
_METRIC = re.compile(rb"=[-+]?[0-9.]+(?:e[-+]?[0-9]+)?")
_VERSION = re.compile(rb"-v[0-9]+\Z")
_OTHER_EXTENSION = re.compile(rb"\.[A-Za-z][A-Za-z0-9]*\Z")

# After these words the number of a plain file counts shards, ranks or data.
_NO_GENERATION = re.compile(
    rb"(?:.*[^a-z])?(?:of|rank|shard|part|chunk|split|fold|worker|seed|rng_state|random_states"
    rb"|data|frame|batch|sample|last|latest|best)[-_=]?",
    re.IGNORECASE | re.DOTALL,
)
_WORD_AT_END = re.compile(rb"(?:.*[^a-z])?" + _WORDS + rb"[-_=]?", re.IGNORECASE | re.DOTALL)
_ALWAYS_MODEL = re.compile(rb"\.(?:pt|pth|ckpt|safetensors|(?:pt|pth|ckpt)\.tar)\Z", re.IGNORECASE)
_TAR = re.compile(rb"(?<!\.pt)(?<!\.pth)(?<!\.ckpt)\.tar\Z", re.IGNORECASE)

# What programs put around a name that they will rename: tmp-checkpoint-5, step-5.tmp, .x.pt.tmp.17,
# 5.orbax-checkpoint-tmp, and rsync's .model-5.pt.Xa3b9Q.
_TEMPORARY = re.compile(
    rb"\.?(?:tmp|temp)[-_.](?P<prefixed>.+)"
    rb"|\.?(?P<orbax>.+)\.orbax-checkpoint-tmp(?:-[0-9]+)?"
    rb"|\.?(?P<suffixed>.+)(?:[-_.](?:tmp|temp)(?:[-_.][0-9A-Za-z]+)?"
    rb"|\.(?:part|partial|incomplete|inprogress))"
    rb"|\.(?P<rsync>.+)\.[0-9A-Za-z]{6}",
    re.DOTALL | re.IGNORECASE,
)


@lru_cache(NAMES_KEPT)
def without_temporary(name: bytes) -> tuple[bytes, bool]:
    """`name` as it will be after the rename, and whether it looks temporary at all."""
    match = _TEMPORARY.fullmatch(name)
    if match is None or match.lastgroup is None:
        return name, False
    return match[match.lastgroup], True


def _number(digits: bytes) -> int | None:
    significant = digits.lstrip(b"0") or b"0"
    # The length first: int() refuses thousands of digits with an error of its own.
    if len(significant) > len(str(NUMBER_MAX)) or int(significant) > NUMBER_MAX:
        return None
    return int(significant)


def _directory(name: bytes, parent: bytes) -> _Named | None:
    for layout, pattern in _DIRECTORIES:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        ours = layout is Layout.NUMBERED and parent == b"checkpoints" and match[1] == b"checkpoint_"
        return _Named(Layout.ACCELERATE if ours else layout, match[2], True, match[1])
    return None


def _composer(name: bytes, _parent: bytes) -> _Named | None:
    match = _COMPOSER.fullmatch(name)
    if match is None:
        return None
    return _Named(Layout.COMPOSER, match[1], not name.endswith(b".pt"), b"ep-ba" + match[2])


def _tensorflow(name: bytes, _parent: bytes) -> _Named | None:
    match = _TENSORFLOW.fullmatch(name)
    if match is None:
        return None
    return _Named(Layout.TENSORFLOW, match[2], False, match[1] + match[3])


def _metrics(name: bytes, _parent: bytes) -> _Named | None:
    """Lightning's files (with a sharded strategy directories of that name) and NeMo's trees."""
    body = EXTENSION.sub(b"", name)
    is_file = body != name
    if not is_file and _OTHER_EXTENSION.search(body):
        return None
    body, extension = _VERSION.sub(b"", body), name[len(body) :]
    number = _STEP.search(body) or (_EPOCH.search(body) if is_file else None)
    if number is None:
        return None
    layout = Layout.LIGHTNING if is_file else Layout.NEMO
    return _Named(layout, number[1], not is_file, _METRIC.sub(b"=", body) + extension)


def _plain(name: bytes, _parent: bytes) -> _Named | None:
    body = EXTENSION.sub(b"", name)
    if body == name:
        return None
    body = _RANK.sub(b"", body)
    stem = body.rstrip(b"0123456789")
    if body == stem or _NO_GENERATION.fullmatch(stem):
        return None
    word = _WORD_AT_END.fullmatch(stem) is not None
    if not stem:
        usual = _ALWAYS_MODEL.search(name) is not None  # 0050000.pt, but not 1.npz
    elif _TAR.search(name):
        usual = word  # a numbered tar file is most often a piece of a data set
    else:
        usual = word or stem.endswith((b"-", b"_", b"="))  # resnet50.pt has another number
    if not usual:
        return None
    return _Named(Layout.PLAIN, body[len(stem) :], False, stem + name[len(body) :])


# The first that knows the name decides.
_READERS: tuple[Callable[[bytes, bytes], _Named | None], ...] = (
    _directory,
    _composer,
    _tensorflow,
    _metrics,
    _plain,
)


def _temporary(name: bytes, final: bytes) -> _Named | None:
    """The layouts that show only by their temporary names."""
    match = _ORBAX.fullmatch(final)
    if match is not None and b".orbax-checkpoint-tmp" in name:
        return _Named(Layout.ORBAX, match[2], True, match[1])
    if b"_temp" in name and _TENSORFLOW_TEMPORARY.fullmatch(final):
        stem = final.rstrip(b"0123456789")
        return _Named(Layout.TENSORFLOW, final[len(stem) :], True, stem)
    return None


def _read(name: bytes, parent: bytes) -> tuple[_Named, bytes, bool] | None:
    final, temporary = without_temporary(name)
    # A tracker's temporary name is no generation either: last.ckpt.tmp.
    if is_tracker(name) or is_tracker(final):
        return None
    named = _temporary(name, final) if temporary else None
    for reader in _READERS:
        named = named or reader(final, parent)
    return (named, final, temporary) if named is not None else None


_NUMBER = re.compile(rb"(.*?)([0-9]+)([^0-9]*)\Z", re.DOTALL)

BARE = b"#"
"""The series of names that are nothing but a number."""

Knows: TypeAlias = Callable[[int, bytes], bool]
"""Whether names of a series are generations in the directory that holds component `depth`."""


@lru_cache(NAMES_KEPT)
def series_of(name: bytes) -> bytes | None:
    """A name with its last number taken out, for names that no layout has; None without a number.

    Trackers and temporary names have none either.
    """
    match = _NUMBER.fullmatch(name)
    if match is None or _number(match[2]) is None:
        return None
    if without_temporary(name)[1] or is_tracker(name):
        return None
    return match[1] + BARE + match[3]


def number_in(name: bytes) -> int:
    """The last number in a name that has a series."""
    match = _NUMBER.fullmatch(name)
    assert match is not None, "a name with a series has a number"
    return int(match[2])


def usual_series(series: bytes) -> bool:
    """Whether names of a series may be generations where somebody says that some names are: bare
    numbers, and files of the usual kinds that do not count shards, ranks or data."""
    if series == BARE:
        return True
    stem = series.partition(BARE)[0]
    return EXTENSION.search(series) is not None and not _NO_GENERATION.fullmatch(stem)


def _known(components: Sequence[bytes], knows: Knows) -> Match | None:
    for depth, name in enumerate(components):
        final, temporary = without_temporary(name)
        series = series_of(final)
        if series is None or not knows(depth, series):
            continue
        # What follows the number of a file is most often its extension.
        is_directory = b"." not in series.rpartition(BARE)[2] or depth + 1 < len(components)
        layout = Layout.NUMBERED if is_directory else Layout.PLAIN
        number = number_in(final)
        return Match(depth, layout, number, temporary, is_directory, series, final, usual=False)
    return None


def recognise(components: Sequence[bytes], knows: Knows | None = None) -> Match | None:
    """The outermost of the path's components that names a generation; None if none does.

    `components` are the names below the mount's root, the last one that of the file or directory
    itself. Trackers, logs and backups are never generations, but they belong to one when they lie
    inside it. A number over 63 bits is no number. Where no name is usual, `knows` is asked.
    """
    parent = b""
    for depth, name in enumerate(components):
        found = _read(name, parent)
        parent = name
        if found is None:
            continue
        named, final, temporary = found
        number = _number(named.digits)
        if number is not None:
            is_directory = named.is_directory or depth + 1 < len(components)
            return Match(depth, named.layout, number, temporary, is_directory, named.stem, final)
    return None if knows is None else _known(components, knows)
