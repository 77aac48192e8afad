"""warmup: everything that a layer would compile on first use, compiled now; one rank leads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megamoe.engine.functional import run
from megamoe.engine.layer import MoE
from megamoe.engine.status import DeviceStatus
from megamoe.errors import RangeError, require


def warmup(layer: MoE, token_counts: Sequence[int], *, timeout_s: float = 1800.0) -> None:
    """Compile what calls with these numbers of tokens per rank need; statistics stay as they are.

    A layer with `cuda_graphs` captures the graphs of these numbers as well.
    Over a group all ranks call it. Rank 0 goes first and fills the compiler's cache, the others
    read it, and all leave together, so that no rank is late for the first call. On a CPU there is
    nothing to compile.
    """
    wrong = [num for num in token_counts if not isinstance(num, int) or num < 0]
    require(not wrong, "token counts must be integers from 0 on", got=wrong, kind=RangeError)

    def compile_all() -> None:
        if layer.weights.device.type == "cuda" and layer.backend != "reference":
            run_all(layer, token_counts)
            torch.cuda.synchronize(layer.weights.device)

    if layer._world is None:
        compile_all()
    elif layer._fused_group is not None:  # a launch needs its peers
        fused_group, meeting = layer._fused_group, layer._world.meeting
        meeting.follow("compile the launch", lambda: fused_group.compile(layer), timeout_s)
        meeting.meet("warm up", lambda: fused_group.warm(layer), timeout_s)
    else:
        layer._world.meeting.follow("warm up", compile_all, timeout_s)


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
        gates = torch.ones(num, top_k, device=device)
        if layer._world is None:
            call = layer._call(x, idx, gates)._replace(status=DeviceStatus(device), stats=stats)
            run(call, layer.plan(num))
            if layer._graphs is not None and layer._graphs.serves(x):
                layer._graphs.prepare(num, layer._captured_parts())
            continue
        calc = layer._compute(stats)
        for rows in row_counts(num * top_k, ranks):
            some = calc.tokens(x.new_zeros(rows, weights.hidden))
            expert = torch.arange(rows, device=device) % weights.num_experts
            calc.rows(some, expert, torch.ones(rows, device=device))
        calc.combine(calc.rows(calc.tokens(x.repeat_interleave(top_k, 0)), idx.flatten(),
                               gates.flatten()), slot, x, idx, gates)  # fmt: skip


def row_counts(expected: int, num_ranks: int) -> Iterator[int]:
    """Numbers of rows that reach every tile and every variant a compiler makes of a size.

    Routing decides how many rows a rank gets, up to all of them: powers of two find the tiles; the
    numbers after them are odd, and compilers treat 1 and multiples of 16 apart.
    """
    most = expected * num_ranks
    powers = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    yield from sorted({*powers, *(p + 1 for p in powers if p < most), expected} - {0})
