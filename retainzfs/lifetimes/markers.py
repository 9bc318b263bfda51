"""Files that say something about a checkpoint: completion markers and trackers.

A marker lies inside a generation and is written after everything else. A tracker lies beside the
generations, is rewritten at every save and names the newest; it is never itself a generation. From
the sources of the frameworks that `Layout` names.
"""

import enum
import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache

NAMES_KEPT = 256
"""Names whose reading is remembered: each is asked for several times when a file is made, and the
directories above it with every file."""


class Layout(enum.StrEnum):
    """Whose way of naming generations a name follows."""

    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    HUGGINGFACE = "huggingface"
    ACCELERATE = "accelerate"
    LIGHTNING = "lightning"
    NEMO = "nemo"
    DEEPSPEED = "deepspeed"
    ORBAX = "orbax"
    COMPOSER = "composer"
    TENSORFLOW = "tensorflow"
    NUMBERED = "numbered"
    """A directory whose name is a usual word and a number: `step_100`, `ckpt-5`, `epoch_3`."""
    PLAIN = "plain"
    """A single file with a number and the extension of a checkpoint: `model-5.pt`."""


TRAINER_STATE = b"trainer_state.json"
_DCP = b".metadata"  # PyTorch distributed checkpoint: renamed from .metadata.tmp as the last step

# Only what is written after everything else. So not Megatron's .metadata, and for custom loops none
# of the files that they may write first (metadata.json) or in the middle (a safetensors index).
_MARKERS: Mapping[Layout, tuple[bytes, ...]] = {
    Layout.TORCHTITAN: (_DCP, b"model.safetensors.index.json"),
    Layout.MEGATRON: (b"metadata.json",),
    Layout.HUGGINGFACE: (TRAINER_STATE,),
    Layout.ACCELERATE: (),
    Layout.LIGHTNING: (b"meta.pt",),
    Layout.NEMO: (b"metadata.json",),
    Layout.DEEPSPEED: (),
    Layout.ORBAX: (b"commit_success.txt",),
    Layout.COMPOSER: (_DCP,),
    Layout.TENSORFLOW: (b"*.index",),
    Layout.NUMBERED: (_DCP, TRAINER_STATE, b"commit_success.txt"),
    Layout.PLAIN: (),
}

# Not written last, or outside the generation, but without them a loader finds nothing.
_LISTED_FIRST = frozenset(
    {
        b"_CHECKPOINT_METADATA",
        b"_METADATA",
        b"latest",
        b"latest_checkpointed_iteration.txt",
    }
)
_NAMES = _LISTED_FIRST | {name for names in _MARKERS.values() for name in names}

EXTENSION = re.compile(
    rb"\.(?:pt|pth|ckpt|safetensors|bin|npz|pkl|pickle|h5|hdf5|keras|msgpack|nemo"
    rb"|(?:pt|pth|ckpt)\.tar|tar)\Z",
    re.IGNORECASE,
)
"""The extensions of checkpoints in one file, at the end of a name."""

UNFINISHED = b"-unfinished"

_TRACKER = re.compile(
    rb"latest_checkpointed_iteration\.txt"
    rb"|checkpoint"  # TensorFlow's text file
    rb"|release"  # Megatron's converted model: it has no number
    rb"|latest-rank[0-9]+(?:\.pt)?"
    rb"|events\.out\.tfevents\..*"
    rb"|.*\.(?:log|bak)"
    rb"|.*-unfinished"
    rb"|(?:.*[-_])?(?:last|latest|best)(?:[-_]v?[0-9]+)?",
    re.DOTALL,
)

TRACKER_LENGTH_MAX = 4096
"""A tracker's content is a line or two (bytes); of a longer file only so much needs reading."""

_TF_TARGET = re.compile(rb'^model_checkpoint_path: "(?:[^"\n]*/)?([^"/\n]+)"', re.MULTILINE)

_BEST = re.compile(rb'"best_model_checkpoint": *("(?:[^"\\]|\\.)*")')


def markers_of(layout: Layout) -> tuple[bytes, ...]:
    """The markers of a layout; one that begins with `*` stands for every name with that ending.

    Any of them is proof that the generation is complete. Empty where the layout has none.
    """
    return _MARKERS[layout]


def marker(layout: Layout, name: bytes) -> bool:
    """Whether a file of this name inside a generation of `layout` completes it."""
    return any(
        name.endswith(one[1:]) if one.startswith(b"*") else name == one for one in _MARKERS[layout]
    )


def is_marker(name: bytes) -> bool:
    """Whether readdir lists this name first.

    Deleting a tree goes in readdir order: with the markers gone first, a crash in the middle cannot
    leave something that looks complete.
    """
    return name in _NAMES or name.endswith(b".index")


@lru_cache(NAMES_KEPT)
def is_tracker(name: bytes) -> bool:
    """Whether a file of this name is rewritten or replaced at every save, so never a generation.

    Includes what is beside the generations for other reasons: logs, backups, NeMo's `-unfinished`
    files, Megatron's `release` (no number, hence no retirement), the best and the last so far.
    """
    return _TRACKER.fullmatch(EXTENSION.sub(b"", name)) is not None


def unfinished_marker(name: bytes) -> bytes:
    """The name of the file that NeMo keeps beside `name` while it is being saved or deleted."""
    return EXTENSION.sub(b"", name) + UNFINISHED


def best(content: bytes) -> bytes | None:
    """The name of the generation that a `trainer_state.json` says is the best so far.

    Hugging Face's Trainer writes the keys in order, so it is in the first TRACKER_LENGTH_MAX bytes.
    What follows may be long, and be cut off.
    """
    found = _BEST.search(content)
    if found is None:
        return None
    try:
        path = os.fsencode(json.loads(found[1]))
    except ValueError:
        return None
    return path.rstrip(b"/").rpartition(b"/")[2] or None


def tracked(name: bytes, content: bytes) -> bytes | None:
    """The name of the generation that a tracker says is complete; None if it says nothing.

    For Megatron, DeepSpeed and TensorFlow, which have no marker inside the generation.
    """
    if len(content) > TRACKER_LENGTH_MAX:
        return None
    text = content.strip()
    if name == b"latest_checkpointed_iteration.txt":
        if re.fullmatch(rb"[0-9]{1,19}", text) is not None:
            return b"iter_%07d" % int(text)
        return text if text == b"release" else None
    if name == b"latest":
        return text if re.fullmatch(rb"[^/\n\0]{1,255}", text) is not None else None
    if name == b"checkpoint":
        target = _TF_TARGET.search(text)
        return target[1] if target is not None else None
    return None
