"""Tensors without memory, and calls of every mode on them."""

from types import SimpleNamespace

import torch

import megamoe as mm
from megamoe.engine import (
    chain,
    parallel,
    symm_buffer,
)
from megamoe.engine.call import Call
from megamoe.engine.fused_group import FusedGroup
from megamoe.engine.status import DeviceStatus
from megamoe.formats.quantized import DATA_DTYPE, SCALE_DTYPE, Quantized, data_shape, scale_shape
from megamoe.formats.spec import format_named, recipe_named
from megamoe.kernels.gluon.mega.arguments import World
from megamoe.planner import chain as planned
from megamoe.planner.grouped import GATED, GroupedSpec

META = torch.device("meta")
E, I, H, K = 32, 2048, 4096, 6  # of one rank
MACHINE = {"hopper": "h200", "portable": "h200", "blackwell": "b200"}


def quantized(name, *shape):
    """A tensor in a format, without memory."""
    fmt = format_named(name)
    data = torch.empty(data_shape(shape, fmt), dtype=DATA_DTYPE[fmt.element.name], device=META)
    scale = None
    if name != "bf16":
        scale = torch.empty(scale_shape(shape, fmt), dtype=SCALE_DTYPE[fmt.scale], device=META)
    g = torch.ones(shape[0] if len(shape) > 2 else (), device=META) if fmt.has_global else None
    return Quantized(data, scale, name, shape, g)


def experts(recipe, num=E, intermediate=I):
    name = recipe_named(recipe).weights.name
    extra = {}
    if recipe_named(recipe).acts.has_global:
        one, each = torch.ones((), device=META), torch.ones(num, device=META)
        extra = {"x_global": one, "acts_global": each}
    w13, w2 = quantized(name, num, 2, intermediate, H), quantized(name, num, H, intermediate)
    return mm.ExpertWeights(recipe, w13, w2, **extra)


def status():
    """Words without memory."""
    made = DeviceStatus.around(torch.empty(4352, dtype=torch.int32, device=META))
    made.order_after_last = made.raise_if_seen = lambda: None
    made.copy_to_host_async = lambda top_k: None
    return made


def inputs(num, *, is_quantized=False, recipe="w8a8"):
    x = torch.empty(num, H, dtype=torch.bfloat16, device=META)
    if is_quantized:
        x = quantized(recipe_named(recipe).acts.name, num, H)
        if x.global_scale is not None:
            x = Quantized(x.data, x.scale, x.format, x.shape, torch.ones(num, device=META))
    idx = torch.empty(num, K, dtype=torch.int64, device=META)
    return x, idx, torch.empty(num, K, device=META)


class OneByOne:
    """Both sides, in the order in which they are given work; `sides` gets each launch's."""

    def __init__(self, launched, sides):
        self.launched, self.sides = launched, sides

    def run(self, side, launches):
        before = len(self.launched)
        launches()
        self.sides += [("l1", "l2")[side]] * (len(self.launched) - before)

    def mark(self, side):
        return side

    def wait(self, side, mark):
        assert side != mark

    def join(self):
        pass


def fused_over_ranks(plan, w, options, num):
    """A call of `FusedGroup` on this rank, in memory that no rank shares."""
    group = object.__new__(FusedGroup)
    where = plan.exchange
    memory = torch.empty(where.num_bytes, dtype=torch.uint8, device=META)
    group.buffer = symm_buffer.symm_buffer_in(memory, where)
    peers = torch.empty(8, dtype=torch.int64, device=META)
    group._world = World(8, 1, 0, peers, group.buffer.signals, group.buffer.inbox)
    group.plan, group.num_tokens = plan, num
    group.num_passes, group._each = plan.num_passes, plan.fused_tokens
    layer = SimpleNamespace(
        _status=status(), weights=w, options=options, top_k=K,
        _launch=SimpleNamespace(timeout_s=1.0, is_poisoned=False),
    )  # fmt: skip
    group(layer, *inputs(num), torch.empty(E, dtype=torch.int64, device=META), lambda: None)


def chain_over_ranks(plan, w, options, num, shared=None, ready=None):
    """What `ChainGroup` launches on this rank."""
    where = planned.memory(plan.call, plan.backend)
    memory = torch.empty(where.num_bytes, dtype=torch.uint8, device=META)
    peers = torch.empty(8, dtype=torch.int64, device=META)
    me = chain.Member(chain.buffer_in(memory, where), peers, 0, 8)
    stats = torch.empty(E, dtype=torch.int64, device=META)
    tokens = inputs(num) if ready is None else ready
    chain.run(me, Call(*tokens, w, options, shared, status(), stats), plan)


def staged_over_ranks(plan, w, options, num, shared=None, ready=None):
    """What this rank computes between the all-to-alls, under even routing."""
    x, idx, gates = inputs(num)
    x = x if ready is None else ready
    stats = torch.empty(E, dtype=torch.int64, device=META)
    compute = parallel.COMPUTE[plan.backend](
        w, shared, options, 8 * E, stats, lambda tokens, is_quantized: plan, status()
    )
    sent = compute.tokens(x)
    rows = num * K
    received = Quantized(inputs(rows)[0], None, "bf16", (rows, H))
    if sent.format != "bf16":
        received = inputs(rows, is_quantized=True, recipe=w.recipe)[0]
    expert = torch.empty(rows, dtype=torch.int64, device=META)
    made = compute.rows(received, expert, torch.empty(rows, device=META))
    slots = torch.empty(rows, dtype=torch.int64, device=META)
    compute.combine(made, slots, x, idx, gates)


def alone(recipe, num, variant, num_tokens=0):
    """(rows, matrices, counts, spec) of a grouped GEMM."""
    row, groups = recipe_named(recipe), 8
    lead = (groups, 2) if variant in GATED else (groups,)
    x, w = quantized(row.acts.name, num, H), quantized(row.weights.name, *lead, I, H)
    counts = torch.empty(groups, dtype=torch.int32, device=META)
    return x, w, counts, GroupedSpec(recipe, num, groups, I, H, variant, num_tokens)
