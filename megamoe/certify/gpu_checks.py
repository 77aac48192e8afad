"""Checks that need a GPU: graphs, several ranks in one launch, waits that end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megamoe.certify.checks import Check, Failed
from megamoe.certify.layers import random_experts, random_inputs
from megamoe.certify.target import Target
from megamoe.engine.layer import MoE
from megamoe.errors import MegaMoETimeout

SOON = 0.5  # seconds: the bound of a wait that must end
COUNTS = (1, 3, 8, 9, 64)
RANKS = (2, 4)
WAIT_TOKENS = 8


def tokens_of_rank(rank: int) -> int:
    """Tokens of each rank of a launch."""
    return 4 + 3 * rank


def all_checks(target: Target) -> Iterator[Check]:
    """In the order of `checks.STAGES`."""
    for recipe in target.recipes:
        yield Check("graphs", recipe, partial(_graphs, target, recipe))
    if "fused" not in target.modes:  # the only launches with ranks or waits of one GPU
        return
    for recipe in ("w4a8_block", "w8a8", *(("nvfp4",) if target.backend == "blackwell" else ())):
        if recipe in target.recipes:
            for num in RANKS:
                yield Check("ranks", f"{recipe}, {num} ranks", partial(_ranks, target, recipe, num))
    if target.backend == "blackwell":  # `auto` takes its chains where these hold
        for recipe in target.recipes:
            run = partial(_ranks, target, recipe, RANKS[0], mode="chain")
            yield Check("ranks", f"{recipe}, a chain of {RANKS[0]} ranks", run)
    if "w4a8_block" in target.recipes:
        yield Check("waits", "an absent rank", partial(_waits, target, "w4a8_block"))


def _there(target: Target, num: int, seed: int) -> list[Tensor]:
    sizes = target.sizes
    inputs = random_inputs(num, sizes.num_experts, sizes.top_k, sizes.hidden, "masked", seed)
    return [t.to(target.device) for t in inputs]


def _graphs(target: Target, recipe: str) -> str:
    """Replays with changing token counts and routing: the bits of eager calls."""
    sizes = target.sizes
    weights = random_experts(
        recipe, sizes.num_experts, sizes.hidden, sizes.intermediate, seed=8
    ).to(target.device)
    replayed, eager = (
        MoE(weights, sizes.num_experts, sizes.top_k, backend=target.backend, cuda_graphs=on)
        for on in (True, False)
    )
    num = 0
    for seed in range(3):
        for count in COUNTS:
            inputs = _there(target, count, seed)
            if not torch.equal(replayed(*inputs), eager(*inputs)):
                raise Failed(f"a replay of {count} tokens has other bits than the eager call")
            num += 1
    replayed.check()
    return f"{num} replays"


def _ranks(target: Target, recipe: str, num_ranks: int, mode: str = "fused") -> str:
    """Ranks that share the GPU: the bits of one rank over all tokens."""
    from megamoe.engine.local import LocalRanks

    sizes = target.sizes
    weights = random_experts(
        recipe, sizes.num_experts, sizes.hidden, sizes.intermediate, seed=9
    ).to(target.device)
    ranks = LocalRanks(weights, num_ranks, backend=target.backend, mode=mode)
    parts = [_there(target, tokens_of_rank(rank), rank) for rank in range(num_ranks)]
    whole = [torch.cat(each) for each in zip(*parts, strict=True)]
    wanted = target.call(*whole, weights, backend=target.backend, mode="staged")
    for call in range(3):
        y = torch.cat(ranks(*map(list, zip(*parts, strict=True))))
        ranks.check()
        if not torch.equal(y, wanted):
            raise Failed(f"call {call} of {num_ranks} ranks has other bits than one rank")
    return "3 calls back to back"


def _waits(target: Target, recipe: str) -> str:
    """A rank that never says it is done: the launch ends and names the wait, then works again."""
    from megamoe.engine import fused
    from megamoe.engine.call import Call
    from megamoe.engine.planning import plan_for, traits_of
    from megamoe.engine.status import DeviceStatus
    from megamoe.planner.overrides import checked
    from megamoe.problem import Options

    sizes, options = target.sizes, Options()
    weights = random_experts(
        recipe, sizes.num_experts, sizes.hidden, sizes.intermediate, seed=10
    ).to(target.device)
    inputs = _there(target, WAIT_TOKENS, 0)
    wanted = target.call(*inputs, weights, backend=target.backend, mode="staged")
    plan = plan_for(
        weights, options, traits_of(target.backend, weights, None), num_tokens=WAIT_TOKENS,
        top_k=sizes.top_k, overrides=checked({"backend": target.backend, "mode": "fused"}),
    )  # fmt: skip
    status = DeviceStatus(target.device)
    x, idx, gates = inputs
    call = Call(x, idx, gates, weights, options, None, status, timeout_s=SOON)
    assert plan.mega is not None
    fused.run(call, plan.mega, absent=0)
    try:
        status.check(sizes.top_k)
    except MegaMoETimeout as error:
        text = str(error)
    else:
        raise Failed("the launch ended without a report")
    status.reset()
    again = fused.run(call, plan.mega)
    status.check(sizes.top_k)
    if not torch.equal(again, wanted):
        raise Failed("other bits after the reset")
    return text
