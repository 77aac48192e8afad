"""The gate: no contestant is timed before its result was found right.

A sample of tokens is held against the reference in full precision; where the batch is larger than
the sample, every other row is screened against a plain layer with a wide bound, which a row left
out, written twice or sent to another expert does not pass. Fresh memory is poisoned with NaN during
the check, and so is a graph's output before its replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe import reference
from megamoe.bench.inputs import Job
from megamoe.bench.timer import Prepared, Run, Timer
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.spec import recipe_named
from megamoe.reference.layer import activate

GPU_SAMPLE, CPU_SAMPLE = 256, 32  # tokens
ROW_BOUND = {16: 0.05, 8: 0.15, 4: 0.5}  # by bits of the activations, which the screen leaves wide


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found. `why` is empty where the result may be timed."""

    error: float  # relative Frobenius on the sample
    bound: float
    why: str

    @property
    def ok(self) -> bool:
        return not self.why


class Gate:
    """The expected results of one cell, computed once per recipe."""

    def __init__(self, job: Job) -> None:
        self.job = job
        limit = GPU_SAMPLE if job.device.type == "cuda" else CPU_SAMPLE
        count = job.cell.num_tokens
        if count <= limit:
            self.sample = torch.arange(count)
        else:  # the first, the last, and others at random
            chosen = torch.randperm(count - 2, generator=torch.Generator().manual_seed(0)) + 1
            self.sample = (
                torch.cat([chosen[: limit - 2], torch.tensor([0, count - 1])]).sort().values
            )
        self.sample = self.sample.to(job.device)
        self._exact: dict[str, Tensor] = {}
        self._plain: dict[str, Tensor] = {}

    def exact(self, recipe: str) -> Tensor:
        """The reference's rows of the sample."""
        if recipe not in self._exact:
            j, at = self.job, self.sample
            self._exact[recipe] = reference.moe(
                j.x[at], j.topk_idx[at], j.topk_weights[at], j.weights[recipe],
                j.cell.shape.options, j.weights.shared(recipe),
            )  # fmt: skip
        return self._exact[recipe]

    def plain(self, recipe: str) -> Tensor:
        """All rows with the recipe's weights and unquantised activations, in BF16 products."""
        if recipe not in self._plain:
            self._plain[recipe] = _plain_layer(self.job, recipe)
        return self._plain[recipe]

    def judge(self, y: Tensor, recipe: str, bound: float) -> Verdict:
        """Hold one output against what it must be."""
        wanted = self.job.x.shape
        if y.shape != wanted:
            return Verdict(float("nan"), bound, f"shape {tuple(y.shape)}, not {tuple(wanted)}")
        error = relative(y[self.sample], self.exact(recipe))
        bad = ~y.isfinite().all(dim=1)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            return Verdict(error, bound, f"{int(bad.sum())} rows not finite, first token {first}")
        if not error <= bound:
            return Verdict(error, bound, f"error {error:.2e} above {bound:.1e}")
        return Verdict(error, bound, self._screen(y, recipe, bound))

    def _screen(self, y: Tensor, recipe: str, bound: float) -> str:
        """Every row against the plain layer: none may be far off, whatever the mean says."""
        if len(self.sample) == len(y):
            return ""
        plain = self.plain(recipe).float()
        off = (y.float() - plain).norm(dim=1) / plain.norm(dim=1)
        worst = int(off.argmax())
        limit = max(ROW_BOUND[recipe_named(recipe).acts.element.bits], 3 * bound)
        error = float(off[worst])
        return "" if error <= limit else f"token {worst} is off by {error:.2g} (bound {limit:.2g})"

    def eager(self, run: Run, recipe: str, bound: float, timer: Timer) -> Verdict:
        """Judge a direct call, made in poisoned memory."""
        with poisoned_memory():
            y = run()
            timer.synchronize()
        return self.judge(y, recipe, bound)

    def replay(self, one: Prepared, recipe: str, bound: float, timer: Timer) -> Verdict:
        """Judge what will be timed: a graph's output is poisoned before the replay."""
        return self.judge(poisoned_call(one, timer), recipe, bound)


def poisoned_call(one: Prepared, timer: Timer) -> Tensor:
    """The output of one more call; a graph's output tensor held NaN before it."""
    if one.how == "graph":
        one.call().fill_(float("nan"))
    y = one.call()
    timer.synchronize()
    return y


def relative(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius distance; exactly 0.0 only for equal bits, NaN where there is one."""
    if a.dtype == b.dtype and torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).norm() / b.double().norm())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let torch fill fresh memory with NaN (integers: the largest value)."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=only_warns)
            torch.utils.deterministic.fill_uninitialized_memory = fills


def _plain_layer(job: Job, recipe: str) -> Tensor:
    """Expert by expert with `torch.matmul`; weights are multiplied into each expert's rows."""
    options = job.cell.shape.options
    y = torch.zeros(job.x.shape, dtype=torch.float32, device=job.device)
    for one, token, gate in _each_expert(job, recipe):
        if len(token) == 0:
            continue
        w13, w2 = (w[0].bfloat16() for w in one.dequantize())
        gate_up = (job.x[token] @ w13.T).float()
        if one.b13 is not None:
            gate_up += one.b13.flatten()
        row = (activate(*gate_up.bfloat16().chunk(2, dim=1), options).bfloat16() @ w2.T).float()
        if one.b2 is not None:
            row += one.b2[0]
        y.index_add_(0, token, row * gate)
    return y


def _each_expert(job: Job, recipe: str) -> Iterator[tuple[ExpertWeights, Tensor, Tensor]]:
    """(one expert, its tokens, what their rows are multiplied by), the shared ones last."""
    weights, shared = job.weights[recipe], job.weights.shared(recipe)
    for expert in range(weights.num_experts):
        token, slot = (job.topk_idx == expert).nonzero(as_tuple=True)
        yield weights[expert : expert + 1], token, job.topk_weights[token, slot, None]
    for expert in range(job.cell.shape.num_shared):
        assert shared is not None
        token = torch.arange(len(job.x), device=job.device)
        yield shared[expert : expert + 1], token, torch.ones_like(job.topk_weights[:, :1])
