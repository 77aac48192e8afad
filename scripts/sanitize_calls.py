"""Small calls of the kernels, for compute-sanitizer: sanitize_calls.py [PART ...]

A part is a recipe (every portable kernel), `quantisers`, `graphs` (the kernels around a captured
call), refresh-RECIPE (kernels that write new values into a layer), hopper-RECIPE (Hopper's, on one
rank, and fused over two), chain-RECIPE (the chain's), consan-RECIPE (a few of Hopper's, on few
CTAs), or control-ordered and control-racing (`sanitize_controls`).
Sizes are odd on purpose: short last blocks, ragged and empty experts, masked slots, padding rows.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch
import triton

import megamoe as mm
from megamoe.engine import status
from megamoe.engine.call import Call
from megamoe.engine.grouped import grouped_gemm
from megamoe.engine.local import LocalRanks
from megamoe.engine.planning import Traits, hardware_of, plan_for
from megamoe.engine.portable import PORTABLE
from megamoe.formats.spec import recipe_named
from megamoe.kernels.portable import launch
from megamoe.kernels.portable.acts import CODES
from megamoe.kernels.portable.decode_tokens import decode_tokens
from megamoe.kernels.portable.dispatch import Routing, dispatch, quantize
from megamoe.kernels.portable.graph_io import (
    Inputs,
    ReplayArgs,
    copy_inputs,
    copy_output,
    read_args,
)
from megamoe.kernels.portable.sort import Order, sort_slots
from megamoe.planner import copies
from megamoe.planner import portable as portable_plan
from megamoe.planner.launches import Pass
from megamoe.planner.numerics import numerics
from megamoe.problem import RECIPES, Options
from megamoe.routing.samplers import sample_routing

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
E, I, H, K = 3, 160, 288, 2
BATCHES = (9, 61)  # the narrow and the wide tile


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)


def layer(recipe: str) -> None:
    """Both tiers of the staged layer, FP8 combine, padding rows, quantised tokens."""
    w = mm.ExpertWeights.quantize(normal(E, 2 * I, H), normal(E, H, I), recipe).to(DEVICE)
    device_status = status.DeviceStatus(DEVICE)
    for num in BATCHES:
        x = normal(num, H)
        idx, weight = sample_routing(num, E, K, masked_ratio=0.2)
        count = torch.tensor([num - 3], dtype=torch.int32, device=DEVICE)
        routing = idx.to(DEVICE), weight.to(DEVICE)
        is_wide = num == BATCHES[-1]
        options = Options(combine="fp8" if is_wide and recipe == "w8a8" else "bf16")
        q = mm.quantize(x, recipe_named(recipe).acts.name)
        for tokens, padding in ((x, count), (q, None)):
            plan = plan_for(
                w, options, Traits(), num_tokens=num, top_k=K,
                overrides=(("backend", "portable"),), is_quantized=tokens is q,
            )  # fmt: skip
            call = Call(tokens, *routing, w, options, None, device_status, None, padding)
            assert PORTABLE.run(call, plan).isfinite().all()


def alone(recipe: str) -> None:
    """The grouped GEMM under both schedules, and the atomic finalise."""
    row = recipe_named(recipe)
    x, w = mm.quantize(normal(29, H), row.acts.name), mm.quantize(normal(4, I, H), row.weights.name)
    for counts in ([17, 0, 3, 9], [40, 40, 0, 1]):  # the second is wrong, and must stay inside
        given = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
        grouped_gemm(x, w, given, backend="portable", sort_by_m=True)
        grouped_gemm(x, w, given, backend="portable", schedule="dynamic")
    if recipe == "w4a16":
        tile = portable_plan.pick(recipe, 1)[1]
        arch = hardware_of(DEVICE).arch
        how = launch.arithmetic_of(recipe, numerics("portable", recipe, arch=arch))
        idx = torch.randint(-1, 4, (29, 1), generator=torch.Generator().manual_seed(0)).int()
        order = Order.empty(29, 4, tile.block_m, DEVICE)
        steps = Pass("routed", 29, 4, tuple(portable_plan.sort(29, 4, tile.block_m)))
        sort_slots(idx.to(DEVICE), order, steps)
        rows = order.permuted_idx_to_expanded_idx.numel()
        held = decode_tokens(mm.quantize(normal(rows, H), "bf16"), how, copies.decode(rows, H))
        total = torch.zeros(29, I, device=DEVICE)
        step = portable_plan.grouped(tile, 29, 4, I, None)
        launch.linear(held, w, order, total, step, how, to=launch.Destination("atomic"))
        assert total.isfinite().all()


def quantisers() -> None:
    """Every format from BF16 and FP32 rows; and bytes together with the routing, which layers ask
    for in FP4 on Blackwell alone."""
    for name in ("mxfp8", "mxfp4", "nvfp4", "fp8_1x128", "fp8_combine"):
        for x in (normal(7, H), normal(7, H).float()):
            step = portable_plan.quantize_rows(
                "quantize", *x.shape, CODES[name].name, is_bf16=x.dtype == torch.bfloat16
            )
            q = quantize(x, name, step=step)
        idx, weight = (t.to(DEVICE) for t in sample_routing(7, E, K, masked_ratio=0.2))
        routing = Routing(
            idx, weight, torch.empty_like(idx, dtype=torch.int32), torch.empty_like(weight),
            status.DeviceStatus(DEVICE).bad_slot,
            torch.tensor([5], dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
        raw = [t if t is None else t.view(torch.uint8) for t in (q.data, q.scale)]
        by = torch.ones((), device=DEVICE) if name == "nvfp4" else None
        if name == "fp8_1x128":
            raw[1] = q.scale
        step = portable_plan.quantize_rows("quantize", 7, H, CODES[name].name)
        dispatch(normal(7, H), *raw, CODES[name], g=by, routing=routing, num_experts=E, step=step)


def graphs() -> None:
    """Arguments read round a ring, inputs from odd places, an output or none."""
    args, held = ReplayArgs.empty(2, DEVICE), Inputs.empty(8, H, K, DEVICE)
    for step, num in enumerate((8, 5, 1, 3)):
        x, y = normal(num, H + step)[:, step:], torch.empty(num, H, device=DEVICE).bfloat16()
        idx, weight = (t.to(DEVICE) for t in sample_routing(num, E, K))
        ids = idx.int() if step % 2 else idx
        to = 0 if step == 2 else y.data_ptr()
        note = x.data_ptr(), ids.data_ptr(), weight.data_ptr(), to, H + step, num, not step % 2, 0
        args.slots[step % 2] = torch.tensor(note)
        steps = copies.around(8, H, K)
        read_args(args, steps.read_args)
        copy_inputs(args.now, held, steps.copy_inputs)
        copy_output(args.now, held.x, steps.copy_output)
        assert to == 0 or torch.equal(y, x)


def hopper_layer(recipe: str) -> None:
    """Hopper's staged launches in one tile of each kind, and its fused one; shared experts too."""
    from megamoe.engine import images
    from megamoe.planner.hopper import as_fused, pick

    w = mm.ExpertWeights.quantize(normal(E, 2 * I, H), normal(E, H, I), recipe).to(DEVICE)
    picked = dict.fromkeys(pick(recipe, rows)[0] for rows in (8, 100, 250, 500, 2000))
    for tile in picked:
        num = 21 if tile.block_m < 64 else 300
        idx, weight = sample_routing(num, E, K, masked_ratio=0.2)
        inputs = (normal(num, H), idx.to(DEVICE), weight.to(DEVICE))
        shape = {"block_m": tile.block_m, "block_n": tile.block_n, "block_k": tile.block_k}
        both = [None] if images.why_apart(w, w[:1]) else [None, w[:1]]
        for shared in both:
            modes = ("staged", "fused") if as_fused(tile) else ("staged",)
            how = {"backend": "hopper", "shared": shared, "overrides": shape}
            one, *others = (mm.MoE(w, E, K, mode=mode, **how)(*inputs) for mode in modes)
            assert one.isfinite().all() and all(torch.equal(one, other) for other in others)

    fused_ranks(w[:2])


def fused_ranks(w: mm.ExpertWeights) -> None:
    """One launch of two ranks: tokens pushed to inboxes, rows to their homes."""
    ranks, parts = LocalRanks(w, 2, timeout_s=60.0), []
    for num in (5, 2):
        idx, weight = sample_routing(num, 2, K, masked_ratio=0.2)
        parts.append((normal(num, H), idx.to(DEVICE), weight.to(DEVICE)))
    found = ranks(*map(list, zip(*parts, strict=True)))
    ranks.check()
    assert all(y.isfinite().all() for y in found)


def refreshed_layer(recipe: str) -> None:
    """New values written into a layer of Hopper's: all experts and some, from floats and bytes."""
    given = [normal(E, 2 * I, H), normal(E, H, I)]
    layer = mm.MoE(mm.ExpertWeights.quantize(*given, recipe).to(DEVICE), E, K, backend="hopper")
    name = recipe_named(recipe).weights.name
    for dtype in (torch.bfloat16, torch.float32):
        w13, w2 = (t.to(dtype) for t in given)
        layer.refresh(w13=w13, w2=w2)
        layer.refresh(w13=w13[:2].clone(), w2=w2[:2].clone(), experts=[2, 0])
    if name != "bf16":
        w = mm.ExpertWeights.quantize(*given, recipe).to(DEVICE)
        layer.refresh(w13=w.w13, w2=w.w2)
    idx, weight = (t.to(DEVICE) for t in sample_routing(21, E, K, masked_ratio=0.2))
    assert layer(normal(21, H), idx, weight).isfinite().all()


def chain_layer(recipe: str) -> None:
    """Every launch of the chain, on one rank: tools may hold apart what ranks launch side by side.

    A few rows, many in several passes, rows home in FP8, tokens that come quantised.
    """
    w = mm.ExpertWeights.quantize(normal(E, 2 * I, H), normal(E, H, I), recipe).to(DEVICE)
    is_w8a8 = recipe == "w8a8"
    for num, pool_rows in ((21, None), (300, 256)):
        options = Options(combine="fp8" if pool_rows else "bf16")
        ranks = LocalRanks(w, 1, options, mode="chain", timeout_s=60.0, pool_rows=pool_rows)
        idx, weight = (t.to(DEVICE) for t in sample_routing(num, E, K, masked_ratio=0.2))
        x = normal(num, H)
        for tokens in (x, mm.quantize(x, "fp8_1x128")) if is_w8a8 else (x,):
            assert ranks([tokens], [idx], [weight])[0].isfinite().all()
        ranks.check()


def control(is_ordered: bool) -> None:
    """A hand-shake as Hopper's kernels have, or none: what a tool says of it is what it can see."""
    from scripts import sanitize_controls

    sanitize_controls.control(DEVICE, is_ordered=is_ordered)


def consan_layer(recipe: str) -> None:
    """The calls of a part of ConSan's (`sanitize_consan`), whose kernels were built before."""
    from megamoe.engine import local, planning
    from scripts import sanitize_consan

    machine = replace(planning.hardware_of(DEVICE), num_sms=sanitize_consan.NUM_CTAS)
    planning.hardware_of = local.hardware_of = lambda device: machine
    triton.knobs.compilation.listener = refuse_to_build
    experts, intermediate, hidden = (getattr(sanitize_consan, size) for size in "EIH")
    w13, w2 = normal(experts, 2 * intermediate, hidden), normal(experts, hidden, intermediate)
    w = mm.ExpertWeights.quantize(w13, w2, recipe).to(DEVICE)
    for what, layer, num in sanitize_consan.layers(recipe):
        idx, weight = sample_routing(num, experts, K, masked_ratio=0.2)
        inputs = normal(num, hidden), idx.to(DEVICE), weight.to(DEVICE)
        if layer.local_ranks > 1:
            ranks = LocalRanks(w, layer.local_ranks, timeout_s=60.0)
            found = ranks(*([t] * layer.local_ranks for t in inputs))
            ranks.check()
        else:
            found = [mm.MoE(w, experts, K, **planned(layer))(*inputs)]
        assert all(y.isfinite().all() for y in found), what
        print(f"ran {what}", flush=True)


def planned(layer) -> dict:
    """A layer's overrides as arguments of `MoE`."""
    given = dict(layer.overrides)
    own = {name: given.pop(name) for name in ("backend", "mode")}
    return {**own, "overrides": given}


def refuse_to_build(src, cache_hit: bool, **_) -> None:
    """A kernel of ours that the build did not make would take a minute here, under the limit."""
    name = src.fn.__name__
    assert cache_hit or not src.fn.is_gluon(), f"{name} was not built by sanitize_consan.py"


OTHERS = {
    "quantisers": quantisers,
    "graphs": graphs,
    "control-ordered": partial(control, True),
    "control-racing": partial(control, False),
}


def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory that ConSan's kernels keep their own state in."""
    return torch.empty(size, dtype=torch.int8, device=DEVICE)


if __name__ == "__main__":
    triton.set_allocator(scratch)
    wanted = sys.argv[1:] or [*RECIPES, "quantisers", "graphs"]
    for name in wanted:
        if name in OTHERS:
            OTHERS[name]()
        elif name.startswith("hopper-"):
            hopper_layer(name.removeprefix("hopper-"))
        elif name.startswith("refresh-"):
            refreshed_layer(name.removeprefix("refresh-"))
        elif name.startswith("consan-"):
            consan_layer(name.removeprefix("consan-"))
        elif name.startswith("chain-"):
            chain_layer(name.removeprefix("chain-"))
        else:
            layer(name)
            alone(name)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        print("done", name, flush=True)
