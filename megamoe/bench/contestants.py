"""Who takes part: our backends in every recipe, and other libraries that can be imported here.

A factory takes a `Job` and gives an `Entry`, or raises: `NotAvailable` where it cannot run here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.bench.inputs import Job
from megamoe.bench.timer import Run
from megamoe.engine import backends
from megamoe.engine.layer import MoE
from megamoe.errors import NotAvailable, RangeError, one_of, require
from megamoe.formats.spec import recipe_named
from megamoe.planner.choice import Value
from megamoe.planner.numerics import narrowest_mma
from megamoe.planner.plan import MODES

FP8 = torch.float8_e4m3fn
NOT_CAPTURABLE = ("reference",)  # chooses rows on the host


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant that is ready to be checked."""

    run: Run
    backend: str  # the one that `auto` resolved to
    expert_bytes: int  # of one expert's weights and scales
    mma: str
    judged_as: str  # the recipe whose reference its result is held against
    bound: float  # relative Frobenius
    capturable: bool = True
    note: str = ""
    ran: str = ""  # backend and mode of its plan, where it is ours


Factory = Callable[[Job], Entry]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A name in the table, and how to make it for a job."""

    name: str
    recipe: str
    ours: bool
    make: Factory


def contestants(
    names: Sequence[str],
    recipes: Sequence[str],
    device: torch.device,
    overrides: Mapping[str, Value] | None = None,
) -> tuple[Contestant, ...]:
    """Every backend of ours in every recipe, and each foreign one once.

    A name is a backend ("portable", "auto"), one in a mode ("hopper:fused"), or a foreign one.
    """
    require(len(names) > 0, "there must be at least one backend", got="none", kind=RangeError)
    for recipe in recipes:
        recipe_named(recipe)
    rows: list[Contestant] = []
    for name in dict.fromkeys(names):
        backend, _, mode = name.partition(":")
        one_of(backend, (*backends.NAMES, *FOREIGN), "backend")
        if backend in FOREIGN:
            recipe, make = FOREIGN[backend]
            rows.append(Contestant(backend, recipe, False, make))
            continue
        one_of(mode or "auto", MODES, "mode")
        if backend == "auto":
            chosen = backends.resolve("auto", mode or "auto", device).name
            name = f"{chosen}:{mode}" if mode else chosen
        for recipe in recipes:
            rows.append(Contestant(name, recipe, True, ours(name, recipe, overrides)))
    return tuple({(c.name, c.recipe): c for c in rows}.values())


def ours(name: str, recipe: str, overrides: Mapping[str, Value] | None = None) -> Factory:
    """The layer itself, through its public class; a mode that cannot take the cell refuses it."""
    backend, _, mode = name.partition(":")

    def make(job: Job) -> Entry:
        backends.resolve(backend, mode or "auto", job.device)  # refuse before weights are made
        weights, shape = job.weights[recipe], job.cell.shape
        o = shape.options
        layer = MoE(
            weights, shape.num_experts, shape.top_k, max_tokens_per_rank=job.cell.num_tokens,
            activation=o.activation, clamp=o.clamp, weight_at=o.weight_at, combine=o.combine,
            backend=backend, mode=mode or "auto", shared=job.weights.shared(recipe),
            overrides=overrides,
        )  # fmt: skip
        return Entry(
            run=lambda: layer(job.x, job.topk_idx, job.topk_weights),
            backend=layer.backend,
            ran=f"{layer.backend}:{layer.plan(job.cell.num_tokens).mode}",
            expert_bytes=weights.nbytes // weights.num_experts,
            mma=narrowest_mma(recipe),
            judged_as=recipe,
            bound=recipe_named(recipe).tolerance,
            capturable=layer.backend not in NOT_CAPTURABLE,
        )

    return make


class _Sorted:
    """Routing of an unfused pipeline, made outside the timing: in its favour."""

    def __init__(self, job: Job) -> None:
        job.require_no_shared("torch's grouped products")
        s = job.cell.shape
        require(
            s.options.activation == "swiglu" and not s.has_bias,
            "the pipelines of torch compute SwiGLU without biases",
            got=s.name,
            kind=NotAvailable,
        )
        flat = job.topk_idx.flatten()
        order = flat.argsort(stable=True)
        self.token = order // s.top_k
        self.place = torch.empty_like(order)
        self.place[order] = torch.arange(len(order), device=order.device)
        counts = torch.bincount(flat, minlength=s.num_experts)
        self.ends = counts.cumsum(0).to(torch.int32)
        self.gates = job.topk_weights.bfloat16()[:, None]  # [T, 1, top_k]
        self.limit = s.options.limit

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        if self.limit != float("inf"):
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return F.silu(gate) * up

    def combine(self, rows: Tensor) -> Tensor:
        per_token = rows[self.place].view(len(self.gates), self.gates.shape[2], -1)
        return torch.bmm(self.gates, per_token)[:, 0]


def torch_bf16(job: Job) -> Entry:
    """torch._grouped_mm: gather, L1, SwiGLU, L2, weighted combine, all in BF16."""
    grouped = torch_function("_grouped_mm")
    routed, weights = _Sorted(job), job.weights["bf16"]
    w13, w2 = weights.w13.data.flatten(1, 2), weights.w2.data

    def run() -> Tensor:
        gate_up = grouped(job.x[routed.token], w13.transpose(1, 2), offs=routed.ends)
        acts = routed.swiglu(gate_up)
        return routed.combine(grouped(acts, w2.transpose(1, 2), offs=routed.ends))

    return Entry(
        run, "torch", weights.nbytes // weights.num_experts, "bf16", "bf16", 1e-2,
        note="sort outside the timing; against the BF16 layer",
    )  # fmt: skip


def torch_fp8(job: Job) -> Entry:
    """torch._scaled_grouped_mm with one scale per row of tokens and weights."""
    grouped = torch_function("_scaled_grouped_mm")
    require(
        job.device.type == "cuda",
        "torch._scaled_grouped_mm needs a GPU",
        got=str(job.device),
        kind=NotAvailable,
    )
    routed, weights = _Sorted(job), job.weights["bf16"]
    w13, s13 = rowwise_experts(weights.w13.data.flatten(1, 2))
    w2, s2 = rowwise_experts(weights.w2.data)

    def linear(x: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        return grouped(
            x, w.transpose(1, 2), scale, w_scale,
            offs=routed.ends, out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip

    def run() -> Tensor:
        x, scale = rowwise(job.x)
        rows = x.view(torch.uint8)[routed.token].view(FP8)
        gate_up = linear(rows, scale[routed.token], w13, s13)
        acts, acts_scale = rowwise(routed.swiglu(gate_up))
        return routed.combine(linear(acts, acts_scale, w2, s2))

    held = w13.numel() + w2.numel() + 4 * (s13.numel() + s2.numel())
    return Entry(
        run, "torch", held // len(w13), "fp8", "bf16", 8e-2,
        note="sort outside the timing; fast accumulation; against the BF16 layer",
    )  # fmt: skip


def rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [..., k] and one FP32 scale per row [...]."""
    scale = x.abs().amax(dim=-1).float().clamp_min(1e-12) / 448.0
    return (x / scale[..., None]).to(FP8), scale


def rowwise_experts(w: Tensor) -> tuple[Tensor, Tensor]:
    """`rowwise` of [E, n, k] without FP32 copies of all experts at once."""
    data = torch.empty(w.shape, dtype=FP8, device=w.device)
    scale = torch.empty(w.shape[:2], dtype=torch.float32, device=w.device)
    for idx, one in enumerate(w):
        data[idx], scale[idx] = rowwise(one)
    return data, scale


def torch_function(name: str) -> Callable[..., Tensor]:
    function = getattr(torch, name, None)
    require(
        function is not None,
        f"this contestant needs torch.{name}",
        got=f"torch {torch.__version__}",
        kind=NotAvailable,
    )
    return function  # type: ignore[return-value]


# name -> (recipe as it stands in the table, factory)
FOREIGN: dict[str, tuple[str, Factory]] = {
    "torch-bf16": ("bf16", torch_bf16),
    "torch-fp8": ("fp8-row", torch_fp8),
}
