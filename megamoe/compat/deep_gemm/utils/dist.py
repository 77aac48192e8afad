"""Process groups as DeepGEMM's test files make them; gloo where there are too few GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_local_rank: dict[str, int] = {}  # of this process, once init_dist ran


def init_dist(local_rank: int, num_local_ranks: int) -> tuple[int, int, Any]:
    """Join the world of MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes) and RANK (of this node).

    Returns this process's rank, the number of ranks, and the group of all of them. With a GPU for
    each local rank it is NCCL's and the default device is that GPU; otherwise gloo's, and
    processes share the GPUs there are.
    """
    num_nodes, node = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    options: dict[str, Any] = {"backend": "gloo"}
    if num_gpus >= num_local_ranks:
        options = {"backend": "nccl", "device_id": torch.device("cuda", local_rank)}
    dist.init_process_group(
        init_method=f"tcp://{address}:{os.environ.get('MASTER_PORT', '8361')}",
        world_size=num_nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
        **options,
    )
    _local_rank["value"] = local_rank
    if num_gpus:
        torch.cuda.set_device(local_rank % num_gpus)
        torch.set_default_device("cuda")
    group = dist.new_group(list(range(dist.get_world_size())))
    return dist.get_rank(), dist.get_world_size(), group


def uneven_all_gather(tensor: Tensor, dim: int = 0, group: Any = None) -> Tensor:
    """The tensors of all ranks, joined along `dim`, in which alone they may differ in size."""
    sizes: list[int | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(sizes, tensor.shape[dim], group=group)
    counts = [int(size or 0) for size in sizes]
    rows = tensor.movedim(dim, 0)
    mine = rows.new_zeros(max(counts), *rows.shape[1:])
    mine[: len(rows)] = rows
    gathered = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(gathered, mine, group=group)
    parts = [part[:count] for part, count in zip(gathered, counts, strict=True)]
    return torch.cat(parts).movedim(0, dim)


def dist_print(s: object = "", once_in_node: bool = False) -> None:
    """Print from every rank, or from the first of each node; then all ranks meet."""
    if not once_in_node or _local_rank.get("value", 0) == 0:
        print(f"{s}\n", end="", flush=True)  # in one piece, beside other ranks' lines
    dist.barrier()
