"""The tiles that the Blackwell backend ships, and its launches compiled without a GPU."""

import pytest
import torch

from megamoe.formats.quantized import DATA_DTYPE, SCALE_DTYPE, Quantized, data_shape, scale_shape
from megamoe.formats.spec import recipe_named
from megamoe.kernels.blackwell import grouped, launch
from megamoe.kernels.blackwell.gemm import gemm_tmem_kernel
from megamoe.kernels.blackwell.mega import launch as mega_launch
from megamoe.kernels.blackwell.mega.kernel import mega_tmem_kernel
from megamoe.kernels.blackwell.weights import place
from megamoe.kernels.gluon.mega.arguments import Experts, Inbox, State, Tokens, World
from megamoe.planner.blackwell import num_rows
from megamoe.planner.blackwell_fused import as_fused
from megamoe.planner.fused import routing_bytes, slot_size
from megamoe.planner.grouped import GATED, GroupedSpec, plan_grouped
from megamoe.planner.launches import Launch, Mega, next_power_of_2
from megamoe.planner.tables.hopper import COUNTERS
from megamoe.problem import Options
from tests.kernels.compiling import compile_kernel

META = torch.device("meta")
E, H, I = 4, 512, 256
K = 6  # slots of a token of a fused launch


def tile_name(tile):
    return f"tmem{tile.block_m}x{tile.block_k}"


class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self):
        self.given = {}

    def __getitem__(self, grid):
        return lambda **given: self.given.update(given)


def quantized(fmt, *shape):
    """A tensor in a format, without memory."""
    data = torch.empty(data_shape(shape, fmt), dtype=DATA_DTYPE[fmt.element.name], device=META)
    scale = None
    if fmt.name != "bf16":
        scale = torch.empty(scale_shape(shape, fmt), dtype=SCALE_DTYPE[fmt.scale], device=META)
    g = torch.ones(shape[0], device=META) if fmt.has_global else None
    return Quantized(data, scale, fmt.name, shape, g)


def launched(recipe, tile, gated, options=None, has_bias=False):
    """The arguments of one launch of a linear, on tensors without memory."""
    how, fmt = launch.arithmetic(recipe), recipe_named(recipe).weights
    kept = Recorder()
    widths = (H, I) if gated else (I, H)
    shape = (E, 2, I, H) if gated else (E, H, I)
    w = place(quantized(fmt, *shape))
    x = launch.pool(how, 64, widths[0], E, tile.block_m, META)
    step = Launch("l1" if gated else "l2", "gemm_tmem_kernel", (148,), tile, "")
    ones = torch.ones(E, device=META)
    bias = torch.empty(E * (2 if gated else 1), widths[1], device=META) if has_bias else None
    more = {"bias": bias, "acts_factor": ones if recipe == "nvfp4" else None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "gemm_tmem_kernel", kept)
        if gated:
            out = launch.pool(how, 64, I, E, tile.block_m, META, x)
            launch.gated(x, w, out, step, how, options or Options(), **more)
        else:
            out = torch.empty(64, 2, H, dtype=torch.bfloat16, device=META)
            launch.linear(x, w, out, step, how, options or Options(), **more)
    return kept.given


def compiled(recipe, tile, gated, arch=100, **rest):
    """The cubin of one launch."""
    given = launched(recipe, tile, gated, **rest)
    return compile_kernel(gemm_tmem_kernel, (), arch, **given)


def compiled_grouped(recipe, variant="gemm", rows=512, n=I, arch=100, **given):
    """(the plan, cubins of its two launches) of a grouped GEMM alone, on tensors without memory."""
    spec, row = GroupedSpec(recipe, rows, E, n, H, variant), recipe_named(recipe)
    plan = plan_grouped(spec, "b200", backend="blackwell", **given)
    is_gated = variant in GATED
    w = place(quantized(row.weights, E, *([2] if is_gated else []), n, H))
    x = quantized(row.acts, rows, H)
    one = torch.ones((), device=META)
    if row.acts.has_global:
        x = Quantized(x.data, x.scale, x.format, x.shape, one)
    index = torch.empty(rows, dtype=torch.int32, device=META)
    counts, gemm, places = torch.empty(E, dtype=torch.int32, device=META), Recorder(), Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "gemm_tmem_kernel", gemm)
        patch.setattr(grouped, "_place_groups_kernel", places)
        if is_gated:
            where = grouped.Rows(index if variant == "gather" else None)
            factor = one if row.acts.has_global else None
            grouped.gated(x, w, counts, plan.launches, recipe, Options(), where, factor)
        else:
            where, dtype = grouped.AS_THEY_LIE, torch.bfloat16
            if variant == "finalize":
                where = grouped.Rows(None, index, rows, 2, torch.ones(rows // 2, 2, device=META))
                dtype = torch.float32
            out = torch.empty(rows, n, dtype=dtype, device=META)
            grouped.linear(x, w, counts, out, plan.launches, recipe, where)
    kernels = (grouped._place_groups_kernel, places), (gemm_tmem_kernel, gemm)
    return plan, [compile_kernel(kernel, (), arch, **kept.given) for kernel, kept in kernels]


def fused_config(recipe, tile, slots, experts, ranks=1, top_k=K, wave_rows=0):
    """What the planner makes of a staged tile for such a launch."""
    tile, why = as_fused(recipe, tile, routing_bytes(slots, experts, ranks))
    assert tile is not None, why
    return Mega(
        tile, slot_size(slots) if ranks == 1 else 0, next_power_of_2(experts, 32),
        next_power_of_2(top_k), tile.num_stages // 2, num_rows(slots, experts, tile.block_m),
        wave_rows,
    )  # fmt: skip


def compiled_fused(recipe, tile, arch=100, **more):
    """The cubin of one fused launch."""
    kept = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mega_launch, "mega_tmem_kernel", kept)
        launch_fused(recipe, tile, **more)
    return compile_kernel(mega_tmem_kernel, (), arch, **kept.given)


def launch_fused(recipe, tile, slots=384, experts=32, ranks=1, local=None, wave_rows=0,
                 has_bias=False, has_count=False, has_trace=False, ids=torch.int32,
                 options=None):  # fmt: skip
    """A fused launch on tensors without memory."""
    how, fmt = launch.arithmetic(recipe), recipe_named(recipe).weights
    local, hidden, intermediate = local or ranks, 2048, 1024
    config = fused_config(recipe, tile, slots, experts, ranks, wave_rows=wave_rows)
    block = config.tile.block_m

    def new(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device=META)

    pool = launch.pool(how, slots, hidden, experts, block, META, None, local, is_far=ranks > 1)
    acts = launch.pool(how, slots, intermediate, experts, block, META, pool, local)
    num = slots // K // ranks
    g = new(()) if recipe == "nvfp4" else None
    x, rows, y = (new(n, hidden, dtype=torch.bfloat16) for n in (num, num * K, num * local))
    count = new(1, dtype=torch.int32) if has_count else None
    words, stats = new(local, dtype=torch.int32), new(experts * local, dtype=torch.int64)
    tokens = Tokens(x, new(num, K, dtype=ids), new(num, K), count, g, rows, y, words, stats)
    w13 = place(quantized(fmt, E, 2, intermediate, hidden))
    w2 = place(quantized(fmt, E, hidden, intermediate))
    biases = (new(E, 2, intermediate), new(E, hidden)) if has_bias else (None, None)
    kept = State(*(new(*n, dtype=torch.int32) for n in ((COUNTERS,), (148, 4096), (8,))))
    world = World()
    if ranks > 1:
        token = hidden * how.kind.X_BITS.value // 8
        inbox = Inbox(
            new(ranks, num, token, dtype=torch.uint8), new(ranks, num, hidden // 64),
            new(ranks, num, 8, dtype=torch.int32), new(ranks, num, 8),
            new(ranks, config.max_experts + 4, dtype=torch.int32),
        )  # fmt: skip
        peers, signals = new(ranks, dtype=torch.int64), new(32, dtype=torch.int32)
        world = World(ranks, local, 0, peers, signals, inbox)
    mega_launch.fused(
        tokens, pool, acts, Experts(w13, w2, experts, 0, *biases, new(experts)),
        Launch("mega", "mega_tmem_kernel", (148,), config, "test"), how, options or Options(),
        kept, world=world, trace=new(148, 4, 128, 4, dtype=torch.int32) if has_trace else None,
    )  # fmt: skip
