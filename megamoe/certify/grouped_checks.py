"""Grouped GEMMs alone, which `auto` takes with a certificate, against `formats` in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megamoe.certify.checks import Check, Failed, held
from megamoe.certify.target import Target, relative
from megamoe.engine.grouped import grouped_finalize, grouped_gemm, grouped_swiglu
from megamoe.formats.quantize import dequantize, quantize, weight_global_scale
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import recipe_named

ORDERS: tuple[dict[str, Any], ...] = (
    {}, {"schedule": "static"}, {"schedule": "dynamic", "sort_by_m": True},
)  # fmt: skip
SLOTS = 2  # of a token
PLAIN = ("bf16", "w4a16")  # activations are BF16


def all_checks(target: Target) -> Iterator[Check]:
    """One for each recipe."""
    for recipe in target.recipes:
        yield Check("gemms", f"{recipe}, grouped alone", partial(_variants, target, recipe))


def _of_format(t: Tensor, name: str, g: float | Tensor) -> Quantized:
    return quantize(t, name, **({"global_scale": g} if name == "nvfp4" else {}))


def _product(x: Quantized, w: Tensor, counts: Tensor) -> Tensor:
    """FP64 [M, n]; rows of a group times its matrix."""
    parts = dequantize(x, torch.float64).split(counts.tolist())
    return torch.cat([part @ matrix.mT for part, matrix in zip(parts, w, strict=True)])


def _same(outs: list[Tensor], what: str) -> None:
    if not all(torch.equal(outs[0], other) for other in outs):
        raise Failed(f"{what} has other bits in another order")


def _variants(target: Target, recipe: str) -> str:
    """Gate, up and activation, of rows in order and gathered; a product; rows to their tokens."""
    sizes, row, rng = target.sizes, recipe_named(recipe), torch.Generator().manual_seed(9)
    counts = torch.tensor([*sizes.layers, 0, 17], dtype=torch.int32)
    num, groups = int(counts.sum()), len(counts)
    x = torch.randn(num, sizes.hidden, dtype=torch.float32, generator=rng).bfloat16()
    checks = []
    for shape in ((2, sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)):
        w = (
            torch.randn(groups, *shape, dtype=torch.float32, generator=rng) / shape[-1] ** 0.5
        ).bfloat16()
        checks.append(_of_format(w, row.weights.name, weight_global_scale(w)))
    w13, w2 = (w.to(target.device) for w in checks)
    exact13, exact2 = (dequantize(w, torch.float64) for w in checks)
    where = torch.randint(num, (num,), generator=rng).int()
    tokens, lying = (_of_format(t, row.acts.name, 0.01) for t in (x, x[where.long()]))
    there = counts.to(target.device)
    how: dict[str, Any] = {"backend": target.backend}
    if row.acts.has_global:
        how["acts_global"] = torch.tensor(0.01, dtype=torch.float32, device=target.device)
    acts = [grouped_swiglu(lying.to(target.device), w13, there, **how, **o) for o in ORDERS]
    if recipe != "w4a16":  # a gather of which is refused by name
        acts.append(grouped_swiglu(
            tokens.to(target.device), w13, there, rows=where.to(target.device), **how
        ))  # fmt: skip
    _same([t.data.view(torch.uint8) for t in acts], "swiglu")
    wide = _product(lying, exact13.flatten(1, 2), counts).bfloat16().float()
    gate, up = wide.split(sizes.intermediate, 1)
    act = torch.nn.functional.silu(gate) * up
    wanted = _of_format(act.bfloat16() if recipe in PLAIN else act, row.acts.name, 0.01)
    first = acts[0].to(torch.device("cpu"))
    worst = relative(dequantize(first), dequantize(wanted))
    held(worst, target.bound(recipe), "swiglu")
    how.pop("acts_global", None)
    outs = [grouped_gemm(acts[0], w2, there, **how, **order).cpu() for order in ORDERS]
    _same(outs, "a product")
    rows = _product(first, exact2, counts)
    held(relative(outs[0], rows), target.bound("bf16"), "product")
    slots = torch.randperm(num, generator=rng).int()
    weights = torch.rand(-(-num // SLOTS), SLOTS, dtype=torch.float32, generator=rng)
    placed = rows.new_zeros(weights.numel(), sizes.hidden)
    placed[slots.long()] = rows.bfloat16().double()
    sums = (placed.view(*weights.shape, -1) * weights[..., None]).sum(1)
    for is_ordered in (True, False):
        got = grouped_finalize(
            acts[0], w2, there, slots.to(target.device), weights.to(target.device),
            deterministic=is_ordered, **how,
        )  # fmt: skip
        held(relative(got.cpu(), sums), target.bound("bf16"), "sums of slots")
    return f"{num} rows in {groups} groups, error of swiglu {worst:.1e}"
