"""Target: the backend on the device that the checks are run on, and how large they are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe import reference
from megamoe.certify.layers import Inputs
from megamoe.engine.functional import moe
from megamoe.engine.planning import plan_for, traits_of
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import CapacityError, NotAvailable
from megamoe.formats.spec import INTERPRETER_FACTOR, recipe_named
from megamoe.planner.overrides import checked
from megamoe.planner.plan import BACKEND_MODES
from megamoe.problem import RECIPES, Options


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the checks are."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    long_k: int  # terms of the adversarial sums
    products: tuple[int, ...]  # tokens of the layers whose results are known
    gemms: tuple[int, ...]  # tokens: from one row an expert to many
    layers: tuple[int, ...]
    num_soak: int  # launches


# Tokens of `products` are those of the narrowest to the widest tiles; `gemms` reach every tile of
# the planners' tables: 4 experts and 2 slots a token make half as many rows an expert.
GPU = Sizes(
    hidden=1024,
    intermediate=512,
    num_experts=8,
    top_k=2,
    long_k=7168,
    products=(1, 8, 16, 64, 128),
    gemms=(2, 8, 32, 64, 128, 256, 512, 2048, 8192),
    layers=(1, 7, 64, 600),
    num_soak=10_000,
)
GPU_QUICK = Sizes(
    hidden=512,
    intermediate=256,
    num_experts=8,
    top_k=2,
    long_k=2048,
    products=(8, 64),
    gemms=(8, 64, 512),
    layers=(7, 64),
    num_soak=200,
)
SMALL = Sizes(
    hidden=96,
    intermediate=64,
    num_experts=4,
    top_k=2,
    long_k=256,
    products=(3,),
    gemms=(2, 9),
    layers=(5,),
    num_soak=8,
)


ONE_RANK_MODES = ("staged", "fused")  # that `auto` takes; others are only run if asked for


@dataclass(frozen=True, slots=True)
class Target:
    """What is certified.

    call       computes a layer as `megamoe.moe` does: another one for tests and emulators
    own_sizes  in place of the device's, for tests
    """

    backend: str
    device: torch.device
    recipes: tuple[str, ...] = RECIPES
    is_quick: bool = False
    call: Callable[..., Tensor] = moe
    own_sizes: Sizes | None = None

    @property
    def sizes(self) -> Sizes:
        if self.own_sizes is not None:
            return self.own_sizes
        if self.device.type != "cuda":
            return SMALL
        return GPU_QUICK if self.is_quick else GPU

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def label(self) -> str:
        """How the checks run."""
        if self.is_gpu:
            return "run"
        return "on the CPU" if self.backend == "reference" else "interpreted"

    @property
    def modes(self) -> tuple[str, ...]:
        """The backend's own that one rank has; the oracle computes what any mode would."""
        if self.backend == "reference":
            return ("staged",)
        return tuple(mode for mode in BACKEND_MODES[self.backend] if mode in ONE_RANK_MODES)

    def takes(
        self,
        mode: str,
        inputs: Inputs,
        weights: ExpertWeights,
        shared: ExpertWeights | None = None,
        **options: Any,
    ) -> bool:
        """Whether the mode takes such a call; fused launches refuse some by name."""
        if mode != "fused" or not self.is_gpu:
            return True
        x, idx, _ = inputs
        asked = checked({"backend": self.backend, "mode": mode})
        traits = traits_of(self.backend, weights.to(self.device), shared)
        try:
            plan_for(
                weights.to(self.device), Options(**options), traits, num_tokens=len(x),
                top_k=idx.shape[1], overrides=asked,
            )  # fmt: skip
        except (NotAvailable, CapacityError):
            return False
        return True

    def bound(self, recipe: str) -> float:
        """The recipe's tolerance; the interpreter's is wider. The oracle has none."""
        if self.backend == "reference":
            return 0.0
        return recipe_named(recipe).tolerance * (1.0 if self.is_gpu else INTERPRETER_FACTOR)

    def run(
        self,
        inputs: Inputs,
        weights: ExpertWeights,
        shared: ExpertWeights | None = None,
        mode: str = "staged",
        **options: Any,
    ) -> Tensor:
        """The layer by this backend, on the CPU again; `options` are those of `Options`."""
        there = [t.to(self.device) for t in inputs]
        also = None if shared is None else shared.to(self.device)
        y = self.call(
            *there, weights.to(self.device), shared=also, backend=self.backend, mode=mode, **options
        )
        return y.cpu()

    def wanted(
        self,
        inputs: Inputs,
        weights: ExpertWeights,
        shared: ExpertWeights | None = None,
        **options: Any,
    ) -> Tensor:
        """The oracle's result, on this device because a CPU would take too long."""
        x, idx, gates = (t.to(self.device) for t in inputs)
        also = None if shared is None else shared.to(self.device)
        there = weights.to(self.device)
        return reference.moe(x, idx, gates, there, Options(**options), also).cpu()


def relative(got: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius distance; 0.0 for equal values, NaN where there is one."""
    a, b = got.double(), wanted.double()
    if a.shape == b.shape and torch.equal(a, b):
        return 0.0
    return float((a - b).norm() / b.norm().clamp_min(1e-300))
