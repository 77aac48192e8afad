"""A caller with two ranks, as it would write it with DeepGEMM: ranks.py FOLDER"""

import sys

import torch

from tests.compat.support import Case, E, H, I, K

TOKENS = {"some and none": (9, 0), "uneven": (5, 12)}


def local(weights, rank, num_ranks):
    """One rank's run of experts."""
    if isinstance(weights, tuple):
        return tuple(local(t, rank, num_ranks) for t in weights)
    per_rank = E // num_ranks
    return weights[rank * per_rank : (rank + 1) * per_rank]


def work(rank, num_ranks, folder):
    import deep_gemm
    from deep_gemm.utils.dist import init_dist

    rank, num_ranks, group = init_dist(rank, num_ranks)
    torch.set_default_device("cpu")
    for mma_type in ("fp8xfp4", "bf16xbf16"):
        buffer = deep_gemm.get_symm_buffer_for_mega_moe(
            group, E, 40, K, H, I, mma_type=mma_type, device="cpu"
        )
        for name, counts in TOKENS.items():
            case = Case(mma_type, counts[rank], seed=0, masked_ratio=0.2)
            case.l1, case.l2 = deep_gemm.transform_weights_for_mega_moe(
                *(local(w, rank, num_ranks) for w in case.plain)
            )
            case.fill(buffer)
            stats = torch.full((E // num_ranks,), 100, dtype=torch.int32)
            y = case.run(buffer, stats, clamp=10.0)
            torch.save((y, stats), f"{folder}/{mma_type} {name} {rank}.pt")
        buffer.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(2, sys.argv[1]), nprocs=2)
