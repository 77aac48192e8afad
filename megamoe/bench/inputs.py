"""Weights and tokens of a cell, made on the device once and shared by all contestants."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.bench.cells import Cell, Shape
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.routing.samplers import even_routing, sample_routing


def normal(device: torch.device, seed: int, *shape: int) -> Tensor:
    """Standard normal values from a seed of their own."""
    rng = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float32, generator=rng, device=device)


def words(device: torch.device, count: int) -> Tensor:
    """Random 32-bit words. A generator of their own: a failed graph capture spoils torch's."""
    rng = torch.Generator(device).manual_seed(0)
    return torch.empty(count, dtype=torch.int32, device=device).random_(generator=rng)


class Weights:
    """The experts of one shape in every recipe that is asked for; each is made once.

    Every expert has its own seed, so all recipes quantise the same BF16 values, one expert at a
    time. Entries are scaled by 1 / sqrt(k), so that every product is about as large as its input.
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        self.shape, self.device, self.seed = shape, device, seed
        self._by_recipe: dict[str, tuple[ExpertWeights, ExpertWeights | None]] = {}

    def expert(self, idx: int) -> tuple[Tensor, Tensor]:
        """BF16 [2I, H] and [H, I] of one expert."""
        h, i = self.shape.hidden, self.shape.intermediate
        seed = 1_000_003 * self.seed + 2 * idx
        w13 = normal(self.device, seed, 2 * i, h).mul_(h**-0.5)
        w2 = normal(self.device, seed + 1, h, i).mul_(i**-0.5)
        return w13.bfloat16(), w2.bfloat16()

    def __getitem__(self, recipe: str) -> ExpertWeights:
        """The routed experts."""
        return self._both(recipe)[0]

    def shared(self, recipe: str) -> ExpertWeights | None:
        """The shared ones, if there are any."""
        return self._both(recipe)[1]

    def _both(self, recipe: str) -> tuple[ExpertWeights, ExpertWeights | None]:
        if recipe not in self._by_recipe:
            num, extra = self.shape.num_experts, self.shape.num_shared
            pair = ExpertWeights.quantize_each(
                map(self.expert, range(num + extra)), num + extra, recipe
            )
            shared = pair[num:] if extra else None
            self._by_recipe[recipe] = replace(pair[:num], **self._biases()), shared
        return self._by_recipe[recipe]

    def _biases(self) -> dict[str, Tensor]:
        if not self.shape.has_bias:
            return {}
        n, h, i = self.shape.num_experts, self.shape.hidden, self.shape.intermediate
        b13 = normal(self.device, self.seed + 11, n, 2, i)
        b2 = normal(self.device, self.seed + 12, n, h)
        return {"b13": b13.bfloat16().float() / 8, "b2": b2.bfloat16().float() / 8}


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One cell's tokens and routing, and the weights of its shape."""

    cell: Cell
    weights: Weights
    x: Tensor  # bf16 [T, H]
    topk_idx: Tensor  # int64 [T, top_k], distinct experts per token
    topk_weights: Tensor  # float32 [T, top_k]

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def touched(self) -> int:
        """Routed experts that some token uses."""
        return len(self.topk_idx.unique())

    def require_no_shared(self, what: str) -> None:
        """Refuse a cell with shared experts."""
        require(
            self.cell.shape.num_shared == 0,
            f"{what} take no shared experts",
            got=self.cell.name,
            kind=NotAvailable,
        )


def make_job(cell: Cell, weights: Weights, seed: int) -> Job:
    """Tokens of a cell, routed uniformly or evenly to as many experts as it says; by the seed."""
    s = cell.shape
    sizes = cell.num_tokens, s.num_experts, s.top_k
    if cell.num_touched is None:
        topk_idx, topk_weights = sample_routing(*sizes, seed=seed)
    else:
        topk_idx, topk_weights = even_routing(*sizes, cell.num_touched, seed=seed)
    x = normal(weights.device, seed + 7, cell.num_tokens, s.hidden).bfloat16()
    return Job(cell, weights, x, topk_idx.to(x.device), topk_weights.to(x.device))
