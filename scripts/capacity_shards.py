"""How long the files are that one node of a Pythia-1B training job saves.

Computed from the published dimensions: 16 layers, hidden size 2048, 8 heads, feed-forward 8192, a
vocabulary of 50304 with padding, embeddings untied, rotary positions; 1,011,781,632 parameters,
trained by 64 ranks, 8 a node. The files are those of GPT-NeoX with DeepSpeed's ZeRO stage 1:

    layer_NN-model_00-model_states.pt
        the fp16 weights of one pipeline layer: 00 is the input embedding, 02 to 17 are the 16
        layers, 19 the last norm, 20 the output embedding; only node 0 has these
    mp_rank_00_model_states.pt
        settings and progress, no weights; only node 0
    zero_pp_rank_R_mp_rank_00_optim_states.pt
        the share of rank R in three flat fp32 tensors: master weights, and both moments of AdamW

Around its tensors `torch.save` puts CONTAINER bytes, and TENSOR more for each: zip headers, padding
to 64 bytes, the directory, and its pickle. These two are rounded, not computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from retainzfs.evaluation.models import PYTHIA_1B

RANKS: Final = 64
RANKS_OF_NODE: Final = 8
HALF, SINGLE = 2, 4  # bytes of a number
CONTAINER: Final = 1200  # bytes
TENSOR: Final = 320  # bytes
SETTINGS: Final = 15_000  # bytes of mp_rank_00_model_states.pt

_TENSORS: Final = tuple(map(math.prod, PYTHIA_1B.tensors))  # numbers in each, as models.neox lists
EMBEDDING, _NORM, LAYER = _TENSORS[:1], _TENSORS[1:3], _TENSORS[4:16]
LAYERS: Final = (len(_TENSORS) - 4) // len(LAYER)
PARAMETERS: Final = PYTHIA_1B.parameters


class Shard(NamedTuple):
    name: str
    size: int  # bytes


def _saved(tensors: tuple[int, ...], width: int) -> int:
    return CONTAINER + sum(count * width + TENSOR for count in tensors)


def node(number: int) -> Iterator[Shard]:
    """Yield the files that a node of the job saves, in the order in which it does."""
    if number == 0:
        parts = {0: EMBEDDING, LAYERS + 3: _NORM, LAYERS + 4: EMBEDDING}
        parts |= {2 + layer: LAYER for layer in range(LAYERS)}
        for index in sorted(parts):
            name = f"layer_{index:02d}-model_00-model_states.pt"
            yield Shard(name, _saved(parts[index], HALF))
        yield Shard("mp_rank_00_model_states.pt", SETTINGS)
    share = -(-PARAMETERS // RANKS)
    for rank in range(number * RANKS_OF_NODE, (number + 1) * RANKS_OF_NODE):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        yield Shard(name, _saved((share,) * 3, SINGLE))
