"""Random calls whose bits must not depend on ranks or mode: one generator, for emulator and GPU.

A case is printed as its seed and fields; `cases(num, seed)` gives the same ones again. A case is a
call in one of Hopper's recipes, with skew to one rank or one expert, masks, the same expert twice,
ranks without tokens, experts that stand on several ranks, a shared expert, quantised tokens, a pool
that takes its rows in passes, other tiles. Expected is one staged call of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch

import megamoe as mm
from megamoe.balance.placement import Placement
from megamoe.distributed.placement import Places
from megamoe.formats.spec import recipe_named
from megamoe.planner.numerics import HOPPER_RECIPES as RECIPES
from megamoe.problem import Options
from megamoe.routing.samplers import SKEWS, sample_routing

RANKS = (1, 2, 4, 8)
EXPERTS = 8
WIDTHS = ((128, 128), (256, 128), (320, 160))  # hidden, intermediate: of an emulated case
GPU_WIDTHS = ((512, 256), (768, 384))
TILES = {  # of chains, besides what the plan picks: bits are those of all tiles
    "w8a8": ({"schedule": "dynamic"}, {"schedule": "static"}, {"schedule": "strided"}),
    "w4a8_block": ({"kernel": "gemm", "schedule": "strided"}, {"decode_ahead": 4}),
}
OPTIONS = ({}, {"weight_at": "combine"}, {"combine": "fp8"}, {"clamp": 10.0})
_WEIGHTS: dict[tuple, tuple[torch.Tensor, ...]] = {}


@dataclass(frozen=True)
class Bits:
    """One case: all that is random in it."""

    seed: int
    recipe: str
    widths: tuple[int, int]
    options: dict[str, object]
    num_tokens: int
    top_k: int
    skew: str
    masked_ratio: float
    is_one_expert: bool  # all slots
    is_twice: bool  # a token has an expert in two slots
    split: str  # of the tokens over ranks
    is_placed: bool  # experts in any order, one of each rank's twice
    is_shared: bool
    is_ready: bool  # tokens come quantised
    has_bias: bool
    in_passes: bool
    tile: dict[str, object]

    def __str__(self) -> str:
        named = ", ".join(f"{k}={v}" for k, v in vars(self).items() if v and k != "seed")
        return f"seed {self.seed}: {named}"

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, topk_idx, topk_weights of all ranks, on the CPU."""
        rng = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.num_tokens, self.widths[0], generator=rng).bfloat16()
        idx, gates = sample_routing(
            self.num_tokens, EXPERTS, self.top_k, skew=self.skew, num_ranks=EXPERTS // self.top_k,
            masked_ratio=self.masked_ratio, seed=self.seed,
        )  # fmt: skip
        if self.is_one_expert:
            idx[idx >= 0] = self.seed % EXPERTS
        if self.is_twice and self.num_tokens:
            idx[self.num_tokens // 2] = idx[self.num_tokens // 2, 0]
        return x, idx, gates

    def counts(self, num_ranks: int) -> list[int]:
        """Tokens of each rank."""
        num, rng = self.num_tokens, Random(self.seed)
        if self.split == "one":
            found = [0] * num_ranks
            found[rng.randrange(num_ranks)] = num
            return found
        if self.split == "even":
            return [num // num_ranks + (r < num % num_ranks) for r in range(num_ranks)]
        cuts = sorted(rng.randint(0, num) for _ in range(num_ranks - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, num], strict=True)]

    def placement(self, num_ranks: int) -> Placement:
        """Which experts a rank holds."""
        if not self.is_placed or num_ranks == 1:
            return Placement.contiguous(EXPERTS, num_ranks)
        rng, each = Random(self.seed + 1), EXPERTS // num_ranks
        order = rng.sample(range(EXPERTS), EXPERTS)
        slots = [order[r * each : (r + 1) * each] for r in range(num_ranks)]
        more = [rng.choice([e for e in range(EXPERTS) if e not in own]) for own in slots]
        return Placement(EXPERTS, tuple((*own, e) for own, e in zip(slots, more, strict=True)))

    def weights(
        self, placement: Placement | None = None, device: torch.device | str = "cpu"
    ) -> mm.ExpertWeights:
        """The experts in order, or as they stand on the ranks of a placement."""
        ids = list(range(EXPERTS)) if placement is None else [e for s in placement.slots for e in s]
        w13, w2, b13, b2 = (t[ids].to(device) for t in self._full(EXPERTS, 0))
        bias = {"b13": b13, "b2": b2} if self.has_bias else {}
        return mm.ExpertWeights.quantize(w13, w2, self.recipe, **bias)

    def shared(self, device: torch.device | str = "cpu") -> mm.ExpertWeights | None:
        """The shared expert."""
        if not self.is_shared:
            return None
        w13, w2, *_ = (t.to(device) for t in self._full(1, 1))
        return mm.ExpertWeights.quantize(w13, w2, self.recipe)

    def _full(self, num: int, seed: int) -> tuple[torch.Tensor, ...]:
        key = num, seed, self.widths
        if key not in _WEIGHTS:
            rng, (hidden, intermediate) = torch.Generator().manual_seed(seed), self.widths

            def normal(*shape: int) -> torch.Tensor:
                return torch.randn(shape, generator=rng)

            _WEIGHTS[key] = (
                (normal(num, 2 * intermediate, hidden) / hidden**0.5).bfloat16(),
                (normal(num, hidden, intermediate) / intermediate**0.5).bfloat16(),
                normal(num, 2 * intermediate) / 4,
                normal(num, hidden) / 4,
            )
        return _WEIGHTS[key]

    def parts(self, num_ranks: int, inputs: tuple) -> list[tuple]:
        """The inputs of each rank: slots name places, and tokens are quantised where they are."""
        x, idx, gates = (t.split(self.counts(num_ranks)) for t in inputs)
        places = Places(self.placement(num_ranks), inputs[0].device)
        routed = [places.physical(one, rank) for rank, one in enumerate(idx)]
        return list(zip([self.ready(one) for one in x], routed, gates, strict=True))

    def ready(self, x: torch.Tensor) -> object:
        """Tokens as they come."""
        return mm.quantize(x, recipe_named(self.recipe).acts.name) if self.is_ready else x

    def modes(self, num_ranks: int) -> tuple[str, ...]:
        """What may take the call: fused launches take BF16 tokens, a shared expert on one rank."""
        no_fused = self.is_ready or (self.is_shared and (num_ranks > 1 or not self.num_tokens))
        found = ("chain",) if num_ranks == 1 else ("chain", "split")  # alone it is no chain
        return found if no_fused else (*found, "fused")


def _takes_quantised(recipe: str) -> bool:
    acts = recipe_named(recipe).acts
    return acts.name != "bf16" and not acts.has_global


def cases(num: int, seed: int = 0, *, on_gpu: bool = False) -> list[Bits]:
    """The cases of seeds from `seed` on; neighbouring ones have other recipes.

    on_gpu  more and wider tokens; what kernels are compiled for is drawn once for each recipe
    """
    return [_case(at, on_gpu) for at in range(seed, seed + num)]


def _case(seed: int, on_gpu: bool) -> Bits:
    rng, at = Random(seed), seed % len(RECIPES)
    recipe, of_kernels = RECIPES[at], Random(at) if on_gpu else rng
    most = 300 if on_gpu else 24
    top_k = of_kernels.choice((1, 2, 2, 4))
    options = at if on_gpu else seed // len(RECIPES)
    return Bits(
        seed=seed,
        recipe=recipe,
        widths=of_kernels.choice(GPU_WIDTHS if on_gpu else WIDTHS),
        options=OPTIONS[options % len(OPTIONS)],
        has_bias=of_kernels.random() < 0.3,
        num_tokens=rng.choice((0, 1, 3, *(rng.randint(4, most) for _ in range(4)))),
        top_k=top_k,
        skew=rng.choice(tuple(SKEWS)),
        masked_ratio=rng.choice((0.0, 0.0, 0.2, 0.6)),
        is_one_expert=rng.random() < 0.15,
        is_twice=top_k > 1 and rng.random() < 0.3,
        split=rng.choice(("any", "any", "even", "one")),
        is_placed=rng.random() < 0.3,
        is_shared=not on_gpu and rng.random() < 0.2,
        is_ready=_takes_quantised(recipe) and rng.random() < 0.3,
        in_passes=rng.random() < 0.2,
        tile=rng.choice(({}, *TILES.get(recipe, ()))),
    )


def options_of(case: Bits) -> Options:
    """The layer's."""
    return Options(**case.options)
