"""A batch that several ranks hold: each computes its part of the rows, then all have all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sharers:
    """Ranks that hold the same tokens.

    num     of them
    rank    this one's number among them
    gather  [rows, hidden] of each rank -> those of all, in order
    """

    num: int
    rank: int
    gather: Callable[[Tensor], Tensor]

    def rows(self, num_tokens: int) -> int:
        """Tokens that each takes; the last ones may lack some."""
        return -(-num_tokens // self.num)

    def run(
        self,
        call: Callable[[Tensor, Tensor, Tensor], Tensor],
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
    ) -> Tensor:
        """`call` of this rank's part of the tokens; the rows of all tokens."""
        num_tokens, hidden = x.shape
        rows = self.rows(num_tokens)
        part = slice(self.rank * rows, (self.rank + 1) * rows)
        y = call(x[part], topk_idx[part], topk_weights[part])
        mine = torch.zeros(rows, hidden, dtype=y.dtype, device=y.device)
        mine[: len(y)] = y
        return self.gather(mine)[:num_tokens]
