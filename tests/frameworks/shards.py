"""Two processes of one job save a sharded model with PyTorch's distributed checkpoint, each to a
directory of its own: `python -m tests.frameworks.shards RANK RENDEZVOUS DIRECTORY`.

Only the first one's directory gets the marker. Nothing here deletes. A third call, with the rank
`load`, reads what was put together from both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

SAVES = 20
SHARD_BYTES = 3 << 20
RANKS = 2


def whole(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(RANKS * SHARD_BYTES // 4096, 1024, generator=generator)


def save(rank: int, rendezvous: str, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for step in range(1, SAVES + 1):
        state = {"weight": distribute_tensor(whole(step), mesh, [Shard(0)])}
        state_dict_saver.save(state, storage_writer=FileSystemWriter(directory / f"step-{step}"))
    dist.destroy_process_group()


def load(directory: Path) -> None:
    """Fails unless the directory holds all of its step."""
    step = int(directory.name.removeprefix("step-"))
    state: dict[str, Any] = {"weight": torch.zeros_like(whole(step))}
    state_dict_loader.load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    assert torch.equal(state["weight"], whole(step))


if __name__ == "__main__":
    if sys.argv[1] == "load":
        load(Path(sys.argv[2]))
    else:
        save(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
