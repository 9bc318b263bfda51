"""PyTorch Distributed Checkpoint: a writer that declares the size, and commits at the end."""

from __future__ import annotations

import math
import os

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from retainzfs import hints
from retainzfs.hooks import advice, committed

__all__ = ["Writer"]


class Writer(FileSystemWriter):
    """`dcp.save(state, storage_writer=Writer(f"{run}/step-{step}"))`, with FileSystemWriter's
    arguments.

    The coordinator commits when every rank has written. On a mount that the coordinator does not
    write to nobody else knows that: there call `commit()` after the save, on one rank or on all. It
    does no harm elsewhere. With `use_collectives=False` every rank finishes by itself, and commits
    if it is the only one of its node (LOCAL_WORLD_SIZE, as torchrun sets it).
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Declare the size of what the ranks of this node are about to write, then write."""
        with advice():
            hints.set(self.path, size=_tensor_bytes(plan) * _local_ranks())
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, and commit where that means that all is written."""
        super().finish(metadata, results)
        if self.use_collectives or _local_ranks() == 1:
            self.commit()

    def commit(self) -> None:
        """Declare the checkpoint complete on this mount; return when it is durable."""
        committed(self.path)


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _tensor_bytes(plan: SavePlan) -> int:
    """Bytes that this rank writes, but for what is pickled."""
    parts = (item.tensor_data for item in plan.items if item.tensor_data is not None)
    return sum(math.prod(p.chunk.sizes) * p.properties.dtype.itemsize for p in parts)
