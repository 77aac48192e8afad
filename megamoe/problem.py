"""Problem: one MoE layer call in integers. Options: what it computes beyond the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from megamoe.errors import DTypeError, RangeError, ShapeError, one_of, require

# The names of the numerics contract; `formats/spec.py` says what each one means.
RECIPES = ("bf16", "w8a8", "w4a16", "w4a8", "w4a8_block", "w4a4", "nvfp4", "nvfp4a16")

WIDTH_MULTIPLE = 32  # hidden and intermediate: one MX group is the smallest unit of every format
MAX_TOP_K = 32  # A009: one warp lane per slot
# The activations, and what `clamp=None` means for each; docs/numerics.md has their formulas.
OWN_CLAMP = {
    "swiglu": float("inf"),
    "gpt_oss": 7.0,
    "situ": float("inf"),  # Kimi K3
    "geglu": float("inf"),
    "geglu_tanh": float("inf"),  # Gemma
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One MoE layer call, as seen from one rank. Integers only: no tensors, no device.

    num_tokens    on this rank, before dispatch; 0 is legal
    hidden        width of a token, a multiple of 32
    intermediate  width after the activation, a multiple of 32; L1 writes 2 * intermediate
    num_experts   over all ranks, a multiple of num_ranks
    top_k         experts of a token, 1 to 32
    num_ranks     ranks that share the experts
    recipe        "bf16", "w8a8", "w4a16", "w4a8", "w4a8_block", "w4a4", "nvfp4" or
                  "nvfp4a16"
    """

    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_ranks: int = 1
    recipe: str = "w4a8_block"

    def __post_init__(self) -> None:
        one_of(self.recipe, RECIPES, "recipe")
        require(
            self.num_tokens >= 0,
            "num_tokens must not be negative",
            got=self.num_tokens,
            kind=ShapeError,
        )
        for name in ("hidden", "intermediate"):
            check_width(name, getattr(self, name))
        for name in ("num_experts", "num_ranks"):
            require(
                getattr(self, name) >= 1,
                f"{name} must be at least 1",
                got=getattr(self, name),
                kind=ShapeError,
            )
        require(
            self.num_experts % self.num_ranks == 0,
            "num_experts must be a multiple of num_ranks",
            got=f"{self.num_experts} experts over {self.num_ranks} ranks",
            fix=f"use {_divisors(self.num_experts)} ranks, or pad with empty experts",
            kind=ShapeError,
        )
        check_top_k(self.top_k, self.num_experts)

    @property
    def num_local_experts(self) -> int:
        """Experts per rank; expert e lives on rank e // num_local_experts."""
        return self.num_experts // self.num_ranks

    @property
    def tokens_per_expert(self) -> float:
        """Rows per expert under even routing: the one load figure that heuristics use."""
        return self.num_tokens * self.num_ranks * self.top_k / self.num_experts

    @property
    def flops(self) -> int:
        """Multiply-adds of both linears on one rank under even routing, counted as two."""
        return 6 * self.num_tokens * self.top_k * self.hidden * self.intermediate


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of the layer that change its result, apart from the recipe.

    activation  "swiglu": silu(gate) * up; "gpt_oss": gate * sigmoid(1.702 gate) * (up + 1);
                "situ", "geglu", "geglu_tanh" on the reference and portable backends
                (docs/numerics.md has the formulas)
    clamp       limit of gate from above and of up on both sides, before the activation; None is
                the activation's own: none for "swiglu", 7.0 for "gpt_oss"
    weight_at   where a token's routing weight multiplies: "l1", the activation's output, or
                "combine", the row that comes back
    combine     rows on their way to the sum: "bf16", or "fp8" with one E8M0 scale per 128 columns
    fast_math   the GPU's approximate division in the activation
    """

    activation: str = "swiglu"
    clamp: float | None = None
    weight_at: str = "l1"
    combine: str = "bf16"
    fast_math: bool = False

    def __post_init__(self) -> None:
        one_of(self.activation, tuple(OWN_CLAMP), "activation")
        one_of(self.weight_at, ("l1", "combine"), "weight_at")
        one_of(self.combine, ("bf16", "fp8"), "combine")
        if self.clamp is None:
            return
        require(
            isinstance(self.clamp, Real) and not isinstance(self.clamp, bool),
            "clamp must be a number, or None",
            got=repr(self.clamp),
            kind=DTypeError,
        )
        object.__setattr__(self, "clamp", float(self.clamp))
        require(
            self.clamp >= 0, "clamp must not be negative, or None", got=self.clamp, kind=RangeError
        )

    @property
    def limit(self) -> float:
        """The clamp in force; infinity is none."""
        return OWN_CLAMP[self.activation] if self.clamp is None else self.clamp


def _divisors(num_experts: int) -> str:
    """The numbers of ranks, up to 64, that share so many experts evenly.

    >>> _divisors(8)
    '1, 2, 4 or 8'
    """
    divisors = [str(n) for n in range(1, min(num_experts, 64) + 1) if num_experts % n == 0]
    return " or ".join(filter(None, (", ".join(divisors[:-1]), divisors[-1])))


def check_width(name: str, value: int) -> None:
    """Require a positive multiple of 32."""
    require(
        value > 0 and value % WIDTH_MULTIPLE == 0,
        f"{name} must be a positive multiple of {WIDTH_MULTIPLE}",
        got=value,
        fix="pad the weights with zero columns",
        kind=ShapeError,
    )


def check_top_k(top_k: int, num_experts: int) -> None:
    """Require 1 <= top_k <= min(num_experts, 32)."""
    require(
        1 <= top_k <= min(num_experts, MAX_TOP_K),
        f"top_k must lie between 1 and min(num_experts, {MAX_TOP_K})",
        got=f"top_k {top_k} with {num_experts} experts",
        kind=ShapeError,
    )


def check_touched(num_touched: int, num_tokens: int, num_experts: int, top_k: int) -> None:
    """Require that so many tokens can use exactly `num_touched` experts."""
    check_top_k(top_k, num_experts)
    slots = num_tokens * top_k
    require(
        top_k <= num_touched <= min(num_experts, slots),
        f"experts touched must lie between top_k ({top_k}) and the lesser of all experts "
        f"({num_experts}) and slots ({slots})",
        got=num_touched,
        kind=RangeError,
    )
