"""The model that all PyTorch programs here train: small, on the CPU, the same every time."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.frameworks.job import Outcome

WIDTH = 256


class Training(Protocol):
    """What a program trains; this module is one."""

    def new(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model and its optimizer, the same every time."""

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
        """Train one step and return the loss."""


def join() -> bool:
    """Be the only process of a group; return whether that is new."""
    if dist.is_initialized():
        return False
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return True


def new() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, 6 MiB with their states."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = (model(inputs) - inputs).square().mean()
    return loss


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, batch(number))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def outcome(loss: float, model: nn.Module) -> Outcome:
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return Outcome(loss.hex(), digest.hexdigest())
