"""Grouped GEMMs alone: rows sorted by group, each group multiplied with a matrix of its own.

Three functions serve the four contiguous variants: `grouped_gemm`, `grouped_swiglu` (of rows that
lie sorted, or that are gathered), `grouped_finalize`. The plan decides backend, tile and schedule
(`planner.grouped`). Nothing is read back from the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megamoe.engine import backends, device_guard, planning
from megamoe.engine.certified import is_certified
from megamoe.engine.derived import known
from megamoe.errors import DTypeError, NotAvailable, ShapeError, require
from megamoe.formats.quantized import Quantized
from megamoe.kernels.portable.grouped import check_operands
from megamoe.planner.choice import Value
from megamoe.planner.grouped import GATED, GroupedPlan, GroupedSpec, plan_grouped
from megamoe.planner.launches import Launch
from megamoe.planner.overrides import TILE, checked
from megamoe.problem import Options

if TYPE_CHECKING:
    from megamoe.kernels.blackwell.grouped import Rows
    from megamoe.kernels.blackwell.weights import Placed


def grouped_gemm(
    x: Quantized,
    w: Quantized,
    counts: Tensor,
    *,
    backend: str = "auto",
    schedule: str = "auto",
    sort_by_m: bool = False,
    **tile: Value,
) -> Tensor:
    """y[r] = w[g] @ x[r] for the rows r of each group g, in the formats of any recipe.

    x          [M, k], sorted by group; NVFP4 with one global scale
    w          [G, n, k]; NVFP4 with one global scale, or one per group
    counts     int32 [G] on the device: rows of each group, M in all (never read back)
    backend    "auto", "portable", or "blackwell" (emulated and compiled, not yet run on hardware)
    schedule   "static": tiles go round robin; "dynamic": CTAs take them from a counter; "auto": as
               the plan says
    sort_by_m  large groups first
    tile       block_m, block_n, ... in place of the plan's
    returns    bf16 [M, n]; every schedule, order and tile gives the same bits
    """
    spec = _spec("gemm", x, w, counts, len(x))
    plan = _plan(spec, w, backend, schedule, sort_by_m, tile)
    _check_rows(x, len(x), plan)
    if plan.backend == "portable":
        from megamoe.kernels.portable.grouped import grouped_gemm as portable
        from megamoe.kernels.portable.launch import arithmetic_of

        is_dynamic = plan["schedule"] == "dynamic"
        with device_guard.on(w.device):
            how = arithmetic_of(plan.spec.recipe, plan.numerics)
            return portable(x, w, counts, how, steps=_both(plan), is_dynamic=is_dynamic)
    from megamoe.kernels.blackwell import grouped

    y = torch.empty(len(x), w.shape[-2], dtype=torch.bfloat16, device=w.device)
    with device_guard.on(w.device):
        _linear(x, w, counts, y, plan, grouped.AS_THEY_LIE)
    return y


def grouped_swiglu(
    x: Quantized,
    w13: Quantized,
    counts: Tensor,
    *,
    rows: Tensor | None = None,
    activation: str = "swiglu",
    clamp: float | None = None,
    acts_global: Tensor | None = None,
    backend: str = "auto",
    schedule: str = "auto",
    sort_by_m: bool = False,
    **tile: Value,
) -> Quantized:
    """The activation of gate and up of each row, quantised for the next product.

    x            [M, k], sorted by group; with `rows` [T, k] in any order
    w13          [G, 2, n, k]: gate, then up
    counts       as of `grouped_gemm`
    rows         int32 [M]: sorted row i is x[rows[i]], gathered on the way; any other is zeros
    activation   "swiglu" or "gpt_oss", and its clamp
    acts_global  NVFP4: the result's global scale, FP32 []
    backend, schedule, sort_by_m, tile  as of `grouped_gemm`
    returns      [M, n] in the format of the recipe's activations
    """
    from megamoe.engine.blackwell import BLACKWELL

    options = Options(activation, clamp)
    BLACKWELL.check_activation(options)
    num = len(x) if rows is None else len(rows)
    variant = "swiglu" if rows is None else "gather"
    _check_map("rows", rows, num, counts)
    spec = _spec(variant, x, w13, counts, num)
    plan = _plan(spec, w13, backend, schedule, sort_by_m, tile)
    _check_rows(x, num, plan)
    if x.spec.has_global:
        require(
            acts_global is not None and acts_global.ndim == 0,
            "NVFP4 results need acts_global, one FP32 scale",
            got=None if acts_global is None else tuple(acts_global.shape),
            kind=ShapeError,
        )
    from megamoe.kernels.blackwell import grouped

    with device_guard.on(w13.device):
        return grouped.gated(
            x, _placed(w13, plan), counts, _both(plan), plan.spec.recipe, options,
            grouped.Rows(rows), acts_global,
        )  # fmt: skip


def grouped_finalize(
    x: Quantized,
    w: Quantized,
    counts: Tensor,
    slots: Tensor,
    weights: Tensor,
    *,
    deterministic: bool = True,
    backend: str = "auto",
    schedule: str = "auto",
    sort_by_m: bool = False,
    **tile: Value,
) -> Tensor:
    """y[t] = sum over the slots of token t of weight * (w[g] @ x[row of the slot]).

    x              [M, k], sorted by group
    w, counts      as of `grouped_gemm`
    slots          int32 [M]: the slot of each row, token * top_k + k, one row a slot at most; a row
                   of any other slot is left out
    weights        FP32 [T, top_k]; a slot without a row adds nothing
    deterministic  rows of slots, added in their order by a launch of its own; or else atomic adds
                   in FP32, whose order and last bits change from call to call
    backend, schedule, sort_by_m, tile  as of `grouped_gemm`
    returns        bf16 [T, n]
    """
    require(
        weights.dtype == torch.float32 and weights.ndim == 2 and weights.is_contiguous(),
        "weights must be FP32 [T, top_k], contiguous",
        got=f"{weights.dtype} {tuple(weights.shape)}",
        kind=DTypeError,
    )
    _check_map("slots", slots, len(x), counts)
    (num_tokens, top_k), n = weights.shape, w.shape[-2]
    spec = _spec("finalize", x, w, counts, len(x))
    spec = replace(spec, num_tokens=num_tokens if deterministic else 0)
    plan = _plan(spec, w, backend, schedule, sort_by_m, tile)
    _check_rows(x, len(x), plan)
    from megamoe.kernels.blackwell import grouped
    from megamoe.kernels.portable.combine import combine

    num = num_tokens * top_k
    with device_guard.on(w.device):
        if not deterministic:
            sums = torch.zeros(num_tokens, n, dtype=torch.float32, device=w.device)
            rows = grouped.Rows(None, slots, num, top_k, weights)
            _linear(x, w, counts, sums, plan, rows)
            return sums.to(torch.bfloat16)
        out = torch.zeros(num_tokens, top_k, n, dtype=torch.bfloat16, device=w.device)
        _linear(x, w, counts, out, plan, grouped.Rows(None, slots, num))
        y = torch.empty(num_tokens, n, dtype=torch.bfloat16, device=w.device)
        if num_tokens:
            every = torch.zeros_like(weights, dtype=torch.int32)
            combine(out, None, every, weights, y, step=plan.launches[-1], weighted=True)
    return y


def _both(plan: GroupedPlan) -> tuple[Launch, Launch]:
    return plan.maps, plan.gemm


def _linear(
    x: Quantized, w: Quantized, counts: Tensor, out: Tensor, plan: GroupedPlan, rows: Rows
) -> None:
    """The plan's launches, unless there are no rows."""
    from megamoe.kernels.blackwell import grouped

    if len(x):
        grouped.linear(x, _placed(w, plan), counts, out, _both(plan), plan.spec.recipe, rows)


def _placed(w: Quantized, plan: GroupedPlan) -> Placed:
    """The matrices with placed scales, made once and kept with them."""
    from megamoe.kernels.blackwell.weights import place, place_into
    from megamoe.kernels.hopper.weights.pack import fits_bf16

    require(
        plan.spec.recipe != "w4a16" or known(w, "fits_bf16", fits_bf16),
        "blackwell needs E8M0 scales of 2**-126 or more where w4a16 decodes to BF16",
        got="a scale of 2**-127",
        kind=NotAvailable,
    )
    placed: Placed = known(w, "placed for sm_100", place, place_into)
    return placed


def _check_rows(x: Quantized, num_rows: int, plan: GroupedPlan) -> None:
    """What Blackwell's copies can read: rows of 16 bytes, from an address of 16 bytes."""
    if plan.backend != "blackwell":
        return
    data = x.data
    steps = data.stride(0) * data.element_size(), data.data_ptr()
    require(
        data.stride(1) == 1 and not any(step % 16 for step in steps),
        "rows of x must be contiguous and begin at multiples of 16 bytes",
        got=f"strides {data.stride()}, address {data.data_ptr():#x}",
        fix="copy x.data",
        kind=ShapeError,
    )
    require(
        len(x) > 0 or num_rows == 0, "x must have the rows that are gathered", got=0,
        kind=ShapeError,
    )  # fmt: skip


def _check_map(name: str, index: Tensor | None, num: int, counts: Tensor) -> None:
    """int32, one for each sorted row, beside the counts; values are not read."""
    if index is None:
        return
    require(
        index.dtype == torch.int32 and index.is_contiguous() and tuple(index.shape) == (num,),
        f"{name} must be int32 [{num}], contiguous",
        got=f"{index.dtype} {tuple(index.shape)}",
        kind=DTypeError,
    )
    require(
        index.device == counts.device,
        f"{name} must lie where counts do",
        got=f"{index.device} and {counts.device}",
        kind=ShapeError,
    )


def _spec(variant: str, x: Quantized, w: Quantized, counts: Tensor, num_rows: int) -> GroupedSpec:
    """These operands in integers, once they fit each other."""
    recipe = check_operands(x, w, counts, is_gated=variant in GATED)
    groups, n, k = w.shape[0], w.shape[-2], w.shape[-1]
    return GroupedSpec(recipe, num_rows, groups, n, k, variant)


def _plan(
    spec: GroupedSpec, w: Quantized, backend: str, schedule: str, sort_by_m: bool,
    tile: dict[str, Value],
) -> GroupedPlan:  # fmt: skip
    """The plan on the device of the matrices."""
    hw = planning.hardware_of(w.device)
    plan = plan_grouped(
        spec, hw, schedule=schedule, sort_by_m=sort_by_m, backend=backend,
        is_certified=is_certified(w.device, hw.arch, spec.recipe),
        **dict(checked(tile, legal=TILE)),
    )  # fmt: skip
    backends.resolve(plan.backend, "auto", w.device)
    return plan
