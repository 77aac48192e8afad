"""warmup: everything that a layer would compile on first use, compiled now; one rank leads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megamoe.engine import device_guard, group_graphs
from megamoe.engine.functional import run
from megamoe.engine.group_calls import GroupCalls
from megamoe.engine.layer import MoE
from megamoe.engine.planning import log_once
from megamoe.engine.row_counts import row_counts
from megamoe.engine.status import DeviceStatus
from megamoe.errors import DTypeError, MegaMoEError, RangeError, require


def warmup(
    layer: MoE,
    token_counts: Sequence[int],
    *,
    timeout_s: float = 1800.0,
    processes: int | None = None,
) -> None:
    """Compile what calls with these numbers of tokens per rank need; statistics stay as they are.

    token_counts  numbers of tokens that calls will have
    timeout_s     over a group: how long ranks wait for each other
    processes     that compile side by side what the disk cache lacks; None: one per core; 1: this
                  one, call after call (`megamoe compile` fills the cache before, without a GPU)

    A layer with `cuda_graphs` captures the graphs of these numbers as well.
    Over a group all ranks call it. Rank 0 goes first and fills the compiler's cache, the others
    read it, and all leave together, so that no rank is late for the first call. On a CPU there is
    nothing to compile.
    """
    require(
        isinstance(token_counts, Iterable), "token counts must be a sequence of integers",
        got=repr(token_counts), fix="such as [8, 64]", kind=DTypeError,
    )  # fmt: skip
    token_counts = list(token_counts)
    wrong = [num for num in token_counts if not isinstance(num, int) or num < 0]
    require(not wrong, "token counts must be integers from 0 on", got=wrong, kind=RangeError)

    def compile_all() -> None:
        if layer.weights.device.type == "cuda" and layer.backend != "reference":
            compile_before(layer, token_counts, processes)
            run_all(layer, token_counts)
            torch.cuda.synchronize(layer.weights.device)

    with device_guard.on(layer.weights.device):
        if layer._world is None:
            compile_all()
        elif layer._fused_group is not None:  # a launch needs its peers
            _warm_group(layer, layer._fused_group, token_counts, timeout_s, processes)
        else:
            layer._world.rendezvous.follow("warm up", compile_all, timeout_s)


def _warm_group(
    layer: MoE,
    group: GroupCalls,
    token_counts: Sequence[int],
    timeout_s: float,
    processes: int | None,
) -> None:
    """Every mode and size that calls with these bounds have: compiled, then made once together."""
    assert layer._world is not None
    rendezvous = layer._world.rendezvous
    sizes = group.bounds(token_counts)
    staged = [bound for calls, bound in sizes if calls is None]

    def lead() -> None:
        if layer.weights.device.type == "cuda":
            if rendezvous.rank == 0:
                compile_before(layer, [bound for _, bound in sizes], processes)
            if staged:
                run_all(layer, staged)
        for calls, bound in sizes:
            if calls is not None:
                calls.compile(layer, bound)

    def make() -> None:
        for one in sizes:
            if one.calls is not None:
                one.calls.warm(layer, one.bound)
                group_graphs.prepare(layer, one)

    rendezvous.follow("compile the launches", lead, timeout_s)
    rendezvous.gather("warm up", make, timeout_s)


@torch.no_grad()
def run_all(layer: MoE, token_counts: Sequence[int]) -> None:
    """This rank's kernels at every size that matters, without any other rank."""
    weights = layer.weights
    device, top_k = weights.device, layer.top_k
    stats = torch.zeros_like(layer.stats)
    ranks = 1 if layer._world is None else layer._world.num_ranks
    for num in token_counts:
        x = torch.zeros(num, weights.hidden, dtype=torch.bfloat16, device=device)
        slot = torch.arange(num * top_k, device=device)
        idx = (slot % weights.num_experts).view(num, top_k)
        gates = torch.ones(num, top_k, dtype=torch.float32, device=device)
        if layer._world is None:
            call = layer._call(x, idx, gates)._replace(status=DeviceStatus(device), stats=stats)
            run(call, layer.plan(num))
            if layer._graphs is not None and layer._graphs.serves(x):
                layer._graphs.prepare(num, layer._captured_parts())
            continue
        compute = layer._compute(stats)
        for rows in row_counts(num * top_k, ranks):
            tokens = compute.tokens(x.new_zeros(rows, weights.hidden))
            expert = torch.arange(rows, device=device) % weights.num_experts
            compute.rows(tokens, expert, torch.ones(rows, dtype=torch.float32, device=device))
        compute.combine(compute.rows(compute.tokens(x.repeat_interleave(top_k, 0)), idx.flatten(),
                               gates.flatten()), slot, x, idx, gates)  # fmt: skip


def compile_before(layer: MoE, token_counts: Sequence[int], processes: int | None) -> None:
    """Fill the disk cache in several processes; where that fails, calls compile by themselves."""
    if processes == 1 or not any(token_counts):
        return
    from megamoe.engine import precompile, recording

    try:
        precompile.compile_layer(recording.spec_of(layer), token_counts, processes=processes)
    except (MegaMoEError, OSError) as error:
        log_once(f"kernels are compiled one after the other: {error}")
