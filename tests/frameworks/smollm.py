"""A model of SmolLM2's shape with random weights, trained on random tokens.

Dimensions as published for SmolLM2-135M: 30 layers, hidden size 576, 9 heads that share 3 keys and
values, feed-forward 1536, vocabulary 49152, the output embedding tied to the input's; RMS norms,
rotary positions of base 100,000, SiLU gates, no biases; 134,515,008 parameters.

Tokens come from torch's own generator, so the next step after a restore depends on its state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEADS, KEY_HEADS, FEED_FORWARD = 576, 9, 3, 1536
HEAD = HIDDEN // HEADS
ROTARY_BASE = 100_000.0
NORM_EPSILON = 1e-5
SEQUENCE = 16  # tokens; the shape of the state does not depend on it
SPREAD = 0.02  # of the random weights


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = nn.Linear(HIDDEN, KEY_HEADS * HEAD, bias=False)
        self.value = nn.Linear(HIDDEN, KEY_HEADS * HEAD, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.view(*projected.shape[:2], -1, HEAD).transpose(1, 2)

        query, key = rotated(heads(self.query(inputs))), rotated(heads(self.key(inputs)))
        mixed = functional.scaled_dot_product_attention(
            query, key, heads(self.value(inputs)), is_causal=True, enable_gqa=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def rotated(heads: Tensor) -> Tensor:
    """Turn each pair of numbers by an angle that depends on the position."""
    half = HEAD // 2
    speeds = ROTARY_BASE ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(heads.shape[-2]), speeds)
    first, second = heads[..., :half], heads[..., half:]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(HIDDEN, NORM_EPSILON)
        self.attention = Attention()
        self.before_forward = nn.RMSNorm(HIDDEN, NORM_EPSILON)
        self.gate = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.up = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, HIDDEN, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self.attention(self.before_attention(inputs))
        normed = self.before_forward(inputs)
        out: Tensor = inputs + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out


class SmolLM(nn.Module):
    def __init__(self, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN, NORM_EPSILON)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=SPREAD)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embedding(tokens)
        for layer in self.layers:
            state = layer(state)
        return functional.linear(self.norm(state), self.embedding.weight)


@dataclass(frozen=True)
class Shape:
    """What is trained; SmolLM2-135M by default."""

    layers: int = 30
    vocabulary: int = 49152

    @property
    def parameters(self) -> int:
        attention = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEY_HEADS * HEAD
        layer = attention + 3 * HIDDEN * FEED_FORWARD + 2 * HIDDEN
        return self.vocabulary * HIDDEN + self.layers * layer + HIDDEN

    def new(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model and its optimizer, the same every time."""
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = SmolLM(self.layers, self.vocabulary)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
        """Train one step on tokens that nobody has seen; the number tells nothing of them."""
        tokens = torch.randint(self.vocabulary, (1, SEQUENCE + 1))
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()
