"""The main job: make a layer and tokens, run it, check it, say what it cost.

Three checks, none of which is the computation itself: the layer's rows against the reference run
token by token on one rank (bitwise where the backend is the reference, else within the recipe's
tolerance); its error against the BF16 layer, which must be what the recipe's formats make
plausible; and the tokens counted per expert against the routing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from megamoe import reference
from megamoe.bench.ranks import run_ranks
from megamoe.bench.workloads import Model
from megamoe.engine.backends import arch_of, resolve
from megamoe.engine.functional import moe
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, RangeError, require
from megamoe.formats.spec import recipe_named
from megamoe.problem import Problem
from megamoe.routing.permute import expert_counts
from megamoe.routing.router import route

SAMPLE = 32  # tokens that are run again one by one, and through the BF16 layer
CPU_BUDGET = 1 << 29  # BF16 bytes of a layer that "auto" scale still makes on a CPU in seconds
SCALES = (1.0, 0.5, 0.25, 0.125, 0.0625)

Progress = Callable[[str, int, int], None]  # step, done, of


@dataclass(frozen=True, slots=True)
class Result:
    """What the job found. `ok` is the verdict of all checks."""

    preset: str
    scale: float
    recipe: str
    backend: str
    device: str
    problem: Problem
    experts_touched: int
    time_ms: float
    tflops: float
    bytes_moved: int
    gbs: float
    weight_bytes: int
    bf16_bytes: int
    error: float  # relative Frobenius against the BF16 layer
    error_range: tuple[float, float]
    reference_error: float  # against the reference, token by token
    reference_bound: float  # 0.0 is bitwise
    counts_ok: bool
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        low, high = self.error_range
        close = self.reference_error <= self.reference_bound
        return close and low <= self.error <= high and self.counts_ok

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "ok": self.ok}


def fitting_scale(model: Model, device: torch.device) -> float:
    """The largest scale whose BF16 layer fits: half a GPU's free memory, seconds on a CPU."""
    budget = CPU_BUDGET
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] // 2
    return next((s for s in SCALES if model.scaled(s).bf16_bytes <= budget), SCALES[-1])


def run(
    model: Model,
    *,
    recipe: str | None = None,
    num_tokens: int = 64,
    num_ranks: int = 1,
    scale: float | None = None,
    device: str = "cpu",
    backend: str = "auto",
    seed: int = 0,
    progress: Progress = lambda step, done, of: None,
) -> Result:
    """Run one layer of `model` on `num_tokens` tokens per rank and check the result."""
    where = torch.device(device)
    is_fitted, scale = scale is None, fitting_scale(model, where) if scale is None else scale
    layer = model.scaled(scale)
    name = layer.recipe_on(arch_of(where)) if recipe is None else recipe
    sizes = (num_tokens, layer.hidden, layer.intermediate, layer.num_experts, layer.top_k)
    problem = Problem(*sizes, num_ranks, name)
    require(num_tokens >= 1, "the job needs at least one token", got=num_tokens, kind=RangeError)
    require(0 <= seed < 2**32, "seed must lie between 0 and 2**32 - 1", got=seed, kind=RangeError)
    chosen = _backend(backend, num_ranks, where)
    _check_memory(layer, problem, where)
    synthetic = _Synthetic(layer, where, seed)
    weights = synthetic.routed(name, lambda done: progress("weights", done, layer.num_experts))
    shared = synthetic.shared(name)
    tokens = [synthetic.tokens(num_tokens, rank) for rank in range(num_ranks)]

    progress("layer", 0, 1)
    if chosen != "reference":
        _layer(tokens, weights, shared, layer, num_ranks, chosen, progress)  # compiles the kernels
    began = _now(where)
    outputs, received = _layer(tokens, weights, shared, layer, num_ranks, chosen, progress)
    seconds = _now(where) - began
    if num_ranks == 1:
        progress("layer", 1, 1)

    x, idx, weight = (torch.cat(parts) for parts in zip(*tokens, strict=True))
    y = torch.cat(outputs)
    sample = (
        torch.linspace(0, len(x) - 1, min(SAMPLE, len(x)), dtype=torch.float32).long().to(where)
    )
    exact = _one_by_one(x, idx, weight, weights, shared, layer, sample, progress)
    plain = synthetic.bf16_layer(x[sample], idx[sample], weight[sample], progress)
    counts = expert_counts(idx, layer.num_experts)
    moved = _bytes_moved(weights, counts, x, name)
    row = recipe_named(name)
    return Result(
        preset=model.name,
        scale=scale,
        recipe=name,
        backend=chosen,
        device=str(where),
        problem=problem,
        experts_touched=int((counts > 0).sum()),
        time_ms=1e3 * seconds,
        tflops=problem.flops * num_ranks / seconds / 1e12,
        bytes_moved=moved,
        gbs=moved / seconds / 1e9,
        weight_bytes=weights.nbytes,
        bf16_bytes=layer.bf16_bytes,
        error=_relative(y[sample], plain),
        error_range=row.quantisation_error,
        reference_error=_relative(y[sample], exact),
        reference_bound=0.0 if chosen == "reference" else row.tolerance,
        counts_ok=int(counts.sum()) == num_ranks * num_tokens * layer.top_k
        and (received is None or torch.equal(received, counts.cpu())),
        notes=[]
        if scale == 1.0
        else [f"widths scaled by {scale:g}" + (" to fit this machine" if is_fitted else "")],
    )


def _backend(backend: str, num_ranks: int, device: torch.device) -> str:
    """The backend's name; several ranks are processes with the reference's arithmetic."""
    wanted = "reference" if num_ranks > 1 and backend == "auto" else backend
    chosen = resolve(wanted, "auto", device).name
    require(
        num_ranks == 1 or chosen == "reference",
        "several ranks of one machine run on the reference backend",
        got=chosen,
        fix="use --backend reference or --ranks 1",
        kind=NotAvailable,
    )
    return chosen


def _check_memory(layer: Model, problem: Problem, device: torch.device) -> None:
    """Refuse what cannot fit: weights, tokens in and out and the router's logits alone."""
    weights = recipe_named(problem.recipe).weights.bits_per_value / 16 * layer.bf16_bytes
    each = 2 * 2 * problem.hidden + 4 * problem.num_experts
    needed = int(weights) + each * problem.num_tokens * problem.num_ranks
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[0]
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    require(
        needed <= there,
        f"the layer and its tokens must fit {there / 2**30:.0f} GiB of memory",
        got=f"at least {needed / 2**30:,.0f} GiB",
        fix="use fewer --tokens or a smaller --scale",
        kind=NotAvailable,
    )


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _layer(
    tokens: list[tuple[Tensor, Tensor, Tensor]],
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    layer: Model,
    num_ranks: int,
    backend: str,
    progress: Progress,
) -> tuple[list[Tensor], Tensor | None]:
    """The computation itself: one rank through the public call, several as processes.

    Also the rows that each expert received, where the ranks counted them.
    """
    if num_ranks == 1:
        o = layer.options
        x, idx, weight = tokens[0]
        return [
            moe(
                x, idx, weight, weights, activation=o.activation, clamp=o.clamp,
                weight_at=o.weight_at, combine=o.combine, shared=shared, backend=backend,
            )
        ], None  # fmt: skip
    return run_ranks(
        tokens, weights, shared, layer.options, lambda done, of: progress("layer", done, of)
    )


def _one_by_one(
    x: Tensor,
    idx: Tensor,
    weight: Tensor,
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    layer: Model,
    sample: Tensor,
    progress: Progress,
) -> Tensor:
    """The reference on single tokens, on one rank: batch and ranks must not matter."""
    rows = []
    for done, token in enumerate(sample.tolist(), 1):
        one = slice(token, token + 1)
        rows.append(reference.moe(x[one], idx[one], weight[one], weights, layer.options, shared))
        progress("check", done, len(sample))
    return torch.cat(rows)


class _Synthetic:
    """Gaussian experts and tokens, any of them made again on demand from its own seed."""

    def __init__(self, layer: Model, device: torch.device, seed: int) -> None:
        self.layer, self.device, self.seed = layer, device, seed
        self.gate = self._normal("gate", 0, layer.num_experts, layer.hidden) / layer.hidden**0.5

    def _normal(self, kind: str, idx: int, *shape: int) -> Tensor:
        kinds = ("gate", "w13", "w2", "b13", "b2", "shared13", "shared2", "x")
        rng = torch.Generator(self.device)
        rng.manual_seed((self.seed * len(kinds) + kinds.index(kind)) * 1_000_003 + idx)
        return torch.randn(*shape, dtype=torch.float32, generator=rng, device=self.device)

    def _expert(self, idx: int, kind: str = "w") -> tuple[Tensor, Tensor]:
        h, i = self.layer.hidden, self.layer.intermediate
        w13 = self._normal(f"{kind}13", idx, 2 * i, h) / h**0.5
        w2 = self._normal(f"{kind}2", idx, h, i) / i**0.5
        return w13.bfloat16(), w2.bfloat16()

    def _biases(self, experts: list[int]) -> dict[str, Tensor]:
        if not self.layer.has_bias:
            return {}
        h, i = self.layer.hidden, self.layer.intermediate
        b13 = torch.stack([self._normal("b13", e, 2, i) for e in experts])
        b2 = torch.stack([self._normal("b2", e, h) for e in experts])
        return {"b13": b13.bfloat16().float() / 8, "b2": b2.bfloat16().float() / 8}

    def routed(self, recipe: str, progress: Callable[[int], None]) -> ExpertWeights:
        n = self.layer.num_experts
        experts: Iterator[tuple[Tensor, Tensor]] = (self._expert(e) for e in range(n))
        weights = ExpertWeights.quantize_each(experts, n, recipe, progress=progress)
        return replace(weights, **self._biases(list(range(n))))

    def shared(self, recipe: str) -> ExpertWeights | None:
        n = self.layer.num_shared
        if n == 0:
            return None
        return ExpertWeights.quantize_each((self._expert(e, "shared") for e in range(n)), n, recipe)

    def tokens(self, count: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of one rank, routed by the model's own rule from random logits."""
        x = self._normal("x", rank, count, self.layer.hidden).bfloat16()
        idx, weight = route(x.float() @ self.gate.T, self.layer.router)
        return x, idx, weight

    def bf16_layer(self, x: Tensor, idx: Tensor, weight: Tensor, progress: Progress) -> Tensor:
        """The same tokens through the unquantised experts, only those they touch."""
        touched = idx.unique().tolist()
        experts = (self._expert(e) for e in touched)
        weights = ExpertWeights.quantize_each(
            experts, len(touched), "bf16", progress=lambda n: progress("bf16", n, len(touched))
        )
        weights = replace(weights, **self._biases(touched))
        local = torch.searchsorted(torch.tensor(touched, device=idx.device), idx)
        return reference.moe(x, local, weight, weights, self.layer.options, self.shared("bf16"))


def _bytes_moved(weights: ExpertWeights, counts: Tensor, x: Tensor, recipe: str) -> int:
    """The least traffic of a call (A083): touched experts, tokens in and out, activations."""
    per_expert = weights.nbytes // weights.num_experts
    rows = int(counts.sum())
    act_bytes = recipe_named(recipe).acts.bits_per_value / 8
    acts = rows * (weights.hidden + 2 * weights.intermediate) * act_bytes
    return int((counts > 0).sum()) * per_expert + int(acts) + 2 * x.numel() * 2


def _relative(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius distance; exactly 0.0 only for equal bits."""
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).norm() / b.double().norm())
