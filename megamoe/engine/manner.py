"""Manner: how the launches of a call are made. No bit of a result depends on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megamoe.engine.weights import ExpertWeights
from megamoe.errors import CapacityError, NotAvailable, RangeError, require
from megamoe.formats.spec import Scale

MOST_S = 60.0  # a fused launch takes milliseconds: whoever waits this long waits in vain
SLOWER = 20.0  # under compute-sanitizer


@dataclass(frozen=True, slots=True)
class Manner:
    """How a layer launches its calls."""

    mode: str = "auto"
    overlaps: bool | None = None  # staged: each kernel is placed while the one before it ends
    timeout_s: float = MOST_S  # of every wait in a fused launch
    reserve_sms: int = 0  # that a fused launch leaves to others
    is_poisoned: bool = False  # NaN bytes in all memory of a fused launch before it begins
    pool_rows: int | None = None  # of a fused launch: a call with more of them runs in waves

    def overlaps_on(self, backend: str) -> bool:
        """Whether staged launches of a backend overlap: where nothing was asked, Hopper's do."""
        return backend == "hopper" if self.overlaps is None else self.overlaps

    def check(self, weights: ExpertWeights, shared: ExpertWeights | None) -> None:
        """Refuse what no call of a layer with these experts could follow."""
        device = weights.device
        if self.mode == "fused" and shared is not None:
            why = why_apart(weights, shared)
            require(
                not why,
                "shared experts of a fused launch must be like the others, "
                "in FP4 with E8M0 scales, without bias",
                got=f"mode='fused' with {why}",
                fix="use mode='auto', which runs them staged",
                kind=NotAvailable,
            )
        require(
            self.timeout_s > 0, "timeout_s must be positive", got=self.timeout_s, kind=RangeError
        )
        require(
            self.reserve_sms >= 0,
            "reserve_sms must not be negative",
            got=self.reserve_sms,
            kind=RangeError,
        )
        require(
            self.pool_rows is None or self.pool_rows > 0,
            "pool_rows must be positive",
            got=self.pool_rows,
            kind=RangeError,
        )
        if self.reserve_sms and device.type == "cuda":
            check_grid(torch.cuda.get_device_properties(device).multi_processor_count, self, 1)


AUTO = Manner()


def why_apart(weights: ExpertWeights, shared: ExpertWeights) -> str:
    """Why no launch has these shared experts among the others; "" where one can."""
    if shared.recipe != weights.recipe:
        return f"shared experts in {shared.recipe}, the others in {weights.recipe}"
    spec = weights.w13.spec
    if spec.element.bits != 4 or spec.scale is not Scale.E8M0:
        return f"shared experts in {weights.recipe}"
    if shared.intermediate != weights.intermediate:
        return f"shared experts of {shared.intermediate}, the others of {weights.intermediate}"
    has_bias = any(t is not None for w in (weights, shared) for t in (w.b13, w.b2))
    return "shared experts and biases" if has_bias else ""


def check_grid(num_sms: int, manner: Manner, ranks: int) -> None:
    """Require an SM for every rank of a launch."""
    require(
        num_sms - manner.reserve_sms >= ranks,
        f"a fused launch needs {ranks} of the GPU's {num_sms} SMs at least",
        got=f"reserve_sms {manner.reserve_sms}",
        fix="reserve fewer",
        kind=CapacityError,
    )


def is_watched(environment: Mapping[str, str]) -> bool:
    """Whether compute-sanitizer, which names itself there, started this process."""
    return any(name.startswith("NV_SANITIZER_INJECTION") for name in environment)


_SLOWER = SLOWER if is_watched(os.environ) else 1.0


def bound_s(timeout_s: float) -> float:
    """How long a wait of a fused launch may take: less than a wait between processes."""
    return min(timeout_s, MOST_S) * _SLOWER
