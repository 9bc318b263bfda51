"""Shard lengths of real models' checkpoints, from their published dimensions (pure).

Parameters are counted tensor by tensor. What a framework writes of them:

    HF Trainer   model.safetensors, the parameters in bfloat16: one file, as these models are below
                 the 5 GB at which transformers begins another; and optimizer.pt, the two moments of
                 AdamW in float32.
    DCP          __R_0.distcp, one a rank: every tensor is cut along its first dimension into as
                 many equal pieces as there are ranks, the last ones shorter (FSDP2); of each piece
                 the parameter and the two moments, in float32.

Headers, and the files of a few KiB to MiB beside these, are left out.

Sources: config.json of EleutherAI/pythia-1b, HuggingFaceTB/SmolLM2-135M and
meta-llama/Meta-Llama-3-70B; 1,011,781,632, 134,515,008 and 70,553,706,496 parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final, NamedTuple

BFLOAT16, FLOAT32 = 2, 4  # bytes
MOMENTS: Final = 2  # of AdamW, for each parameter

Shape = tuple[int, ...]


class Model(NamedTuple):
    name: str
    tensors: tuple[Shape, ...]

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.tensors))


def neox(name: str, vocabulary: int, width: int, layers: int, inner: int) -> Model:
    """GPT-NeoX: biases everywhere, two layer norms a layer, input and output embeddings apart."""
    norm = [(width,), (width,)]
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp = [(inner, width), (inner,), (width, inner), (width,)]
    ends = [(vocabulary, width), *norm, (vocabulary, width)]
    return Model(name, tuple([*ends, *(norm * 2 + attention + mlp) * layers]))


def llama(
    name: str, vocabulary: int, width: int, layers: int, inner: int, keys: int, *, tied: bool
) -> Model:
    """Llama: no biases; `keys` is the width of keys and values; `tied`: one embedding for both."""
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    mlp = [(inner, width), (inner, width), (width, inner)]
    ends: list[Shape] = [(vocabulary, width), (width,)]
    ends += [] if tied else [(vocabulary, width)]
    return Model(name, tuple([*ends, *(attention + mlp + [(width,), (width,)]) * layers]))


def hf_trainer(model: Model) -> tuple[int, ...]:
    """Bytes of the two files of a save by the HF Trainer."""
    return model.parameters * BFLOAT16, model.parameters * MOMENTS * FLOAT32


def dcp(model: Model, ranks: int) -> tuple[int, ...]:
    """Bytes of each rank's file of a distributed checkpoint."""
    kinds = Counter(model.tensors)  # layers repeat
    return tuple(
        (1 + MOMENTS) * FLOAT32 * sum(n * _piece(kind, rank, ranks) for kind, n in kinds.items())
        for rank in range(ranks)
    )


def _piece(tensor: Shape, rank: int, ranks: int) -> int:
    """Elements of a tensor that a rank has, as torch.chunk cuts it."""
    chunk = -(-tensor[0] // ranks)
    rows = min(chunk, max(0, tensor[0] - rank * chunk))
    return rows * math.prod(tensor[1:])


PYTHIA_1B: Final = neox("pythia-1b", 50304, 2048, 16, 8192)
SMOLLM2_135M: Final = llama("smollm2-135m", 49152, 576, 30, 1536, 192, tied=True)
LLAMA_70B: Final = llama("llama-70b", 128256, 8192, 80, 28672, 1024, tied=False)

SHARDS: Final[dict[str, tuple[int, ...]]] = {
    "pythia-1b": hf_trainer(PYTHIA_1B),
    "smollm2-135m": hf_trainer(SMOLLM2_135M),
    "llama-70b-64": dcp(LLAMA_70B, 64),
}
