"""One rank of a DCP save and load: python -m retainzfs.bench.rank DIR STORE RANK WORLD MIB"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

TENSORS = 16


class Writer(FileSystemWriter):
    """Notes how long this rank's own bytes took."""

    seconds = 0.0

    def write_data(self, plan: Any, planner: Any) -> Any:
        started = time.perf_counter()
        future = super().write_data(plan, planner)
        future.wait()
        self.seconds = time.perf_counter() - started
        return future


def main(arguments: list[str]) -> None:
    directory, store, *numbers = arguments
    rank, world, mib = map(int, numbers)
    dist.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world)
    each = (mib << 20) // TENSORS // 4
    state = {f"rank{rank}.layer{number}": torch.rand(each) for number in range(TENSORS)}
    writer = Writer(directory)
    dist.barrier()
    started = time.perf_counter()
    save(state, storage_writer=writer)
    save_s = time.perf_counter() - started
    dist.barrier()
    started = time.perf_counter()
    load(state, storage_reader=FileSystemReader(directory))
    load_s = time.perf_counter() - started
    dist.barrier()
    print(json.dumps({"save": save_s, "load": load_s, "write": writer.seconds}), flush=True)
    os._exit(0)  # gloo's threads need not be waited for


if __name__ == "__main__":
    main(sys.argv[1:])
