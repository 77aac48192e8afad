"""The routing half of dispatch: ids and weights checked and copied, padding masked."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Routing(NamedTuple):
    """The routing as it comes and as kernels read it: every id legal or -1, every weight finite."""

    topk_idx: Tensor  # int32 or int64 [T, k]
    topk_weights: Tensor  # float32 [T, k]
    idx: Tensor  # int32 [T, k], out
    weights: Tensor  # float32 [T, k], out
    error: Tensor  # int32 [1]: the least token * k + slot that was not legal
    num_valid: Tensor | None  # int32 [1] on the device: rows from there on are padding


@triton.jit
def legal_or(idx, num_experts):
    """int32 of ids, -2 for those that name no expert: int64 ones must not wrap round to one."""
    return tl.where((idx < -1) | (idx >= num_experts), -2, idx).to(tl.int32)


@triton.jit
def check_routing(
    topk_idx, topk_weights, idx_out, weights_out, num_valid, error, row, inside, num_experts,
    HAS_COUNT: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Check and copy the slots of rows [r]; of the programs that share rows the first does it."""
    if tl.program_id(0) == 0:
        slot = tl.arange(0, SLOTS)
        at = row[:, None] * TOP_K + slot[None, :]
        used = inside[:, None] & (slot < TOP_K)[None, :]
        idx = legal_or(tl.load(topk_idx + at, mask=used, other=-1), num_experts)
        weight = tl.load(topk_weights + at, mask=used, other=0.0)
        if HAS_COUNT:
            idx = tl.where((row < tl.load(num_valid))[:, None], idx, -1)  # pad fill
        finite = tl.abs(weight) < float("inf")
        bad = (idx < -1) | ((idx >= 0) & (finite == 0))
        first = tl.min(tl.where(bad & used, at, 2147483647).to(tl.int32))
        if first < 2147483647:
            tl.atomic_min(error, first)
        keep = (idx >= 0) & (bad == 0)
        tl.store(idx_out + at, tl.where(keep, idx, -1), mask=used)
        tl.store(weights_out + at, tl.where(keep, weight, 0.0), mask=used)


def routing_arguments(routing: Routing | None, unused: Tensor) -> dict[str, Tensor | int]:
    """Arguments of a kernel that can check the routing; `unused` where there is none."""
    r = routing or Routing(unused, unused, unused, unused, unused, None)
    num_valid = unused if r.num_valid is None else r.num_valid
    top_k = r.idx.shape[1] if routing else 1
    return {
        "topk_idx": r.topk_idx,
        "topk_weights": r.topk_weights,
        "idx_out": r.idx,
        "weights_out": r.weights,
        "num_valid": num_valid,
        "error": r.error,
        "HAS_ROUTING": routing is not None,
        "HAS_COUNT": r.num_valid is not None,
        "TOP_K": top_k,
        "SLOTS": triton.next_power_of_2(top_k),
    }
