"""Router: how a model turns logits into experts and weights, as data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.errors import RangeError, ShapeError, one_of, require
from megamoe.problem import check_top_k

SCORES = ("softmax", "sigmoid", "sqrt_softplus")


@dataclass(frozen=True, slots=True)
class Router:
    """One model's routing rule; `routing.router.route` applies it.

    1. score = softmax, sigmoid or sqrt(softplus) of the logits, in FP32;
    2. choice = score + correction bias (the bias steers the choice only, never the weight);
    3. with groups: a group's mark is the sum of its two best choices; the best groups are kept;
    4. the top_k best choices win, ties going to the lower expert;
    5. weight = score, divided by the winners' sum if `renormalize`, times `scale`.
    """

    num_experts: int  # that it chooses from: the columns of the logits
    top_k: int
    score: str = "softmax"  # or "sigmoid", "sqrt_softplus"
    renormalize: bool = True  # divide a token's weights by their sum
    num_groups: int = 1  # equal groups of experts
    num_kept_groups: int = 1  # groups that a token may choose from
    scale: float = 1.0  # factor on every weight

    def __post_init__(self) -> None:
        one_of(self.score, SCORES, "score")
        check_top_k(self.top_k, self.num_experts)
        require(
            1 <= self.num_kept_groups <= self.num_groups,
            "num_kept_groups must lie between 1 and num_groups",
            got=f"{self.num_kept_groups} of {self.num_groups}",
            kind=ShapeError,
        )
        require(
            self.num_experts % self.num_groups == 0
            and (self.num_groups == 1 or self.num_experts // self.num_groups >= 2),
            "groups must be equal and hold at least two experts",
            got=f"{self.num_experts} experts in {self.num_groups} groups",
            kind=ShapeError,
        )
        candidates = self.num_experts // self.num_groups * self.num_kept_groups
        require(
            self.top_k <= candidates,
            "the kept groups must hold at least top_k experts",
            got=f"{candidates} experts for top_k {self.top_k}",
            kind=ShapeError,
        )
        require(
            0.0 < self.scale < float("inf"),
            "scale must be positive and finite",
            got=self.scale,
            kind=RangeError,
        )


def max_tiles(num_rows: int, num_experts: int, tile_m: int) -> int:
    """Most tiles that `num_rows` routed slots can fill: each expert may leave one unfilled."""
    touched = min(num_rows, num_experts)
    return touched + (num_rows - touched) // tile_m
