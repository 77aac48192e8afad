"""The tiles that the Blackwell backend ships, and its launches compiled without a GPU."""

import pytest
import torch

from megamoe.formats.quantized import DATA_DTYPE, SCALE_DTYPE, Quantized, data_shape, scale_shape
from megamoe.formats.spec import recipe_named
from megamoe.kernels.blackwell import grouped, launch
from megamoe.kernels.blackwell.gemm import gemm_tmem_kernel
from megamoe.kernels.blackwell.weights import place
from megamoe.planner.grouped import GATED, GroupedSpec, plan_grouped
from megamoe.planner.launches import Launch
from megamoe.problem import Options
from tests.kernels.compiling import compile_kernel

META = torch.device("meta")
E, H, I = 4, 512, 256


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
                where = grouped.Rows(None, index, 2, torch.ones(rows // 2, 2, device=META))
                dtype = torch.float32
            out = torch.empty(rows, n, dtype=dtype, device=META)
            grouped.linear(x, w, counts, out, plan.launches, recipe, where)
    kernels = (grouped._place_groups_kernel, places), (gemm_tmem_kernel, gemm)
    return plan, [compile_kernel(kernel, (), arch, **kept.given) for kernel, kept in kernels]
