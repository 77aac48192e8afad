"""Apply a stored order to a tensor, and take it back. The orders themselves live in `layout.tiles`.

An order is a plain permutation: stored[j] = plain[order[j]].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megamoe.errors import ShapeError, require


def swizzle(x: Tensor, order: Sequence[int], dim: int = 0) -> Tensor:
    """Bring dimension `dim` of `x` into the stored order.

    >>> swizzle(torch.tensor([10, 11, 12]), [2, 0, 1]).tolist()
    [12, 10, 11]
    """
    return x.index_select(dim, _index(x, order, dim))


def unswizzle(x: Tensor, order: Sequence[int], dim: int = 0) -> Tensor:
    """Bring dimension `dim` back from the stored order: the inverse of `swizzle`.

    >>> unswizzle(torch.tensor([12, 10, 11]), [2, 0, 1]).tolist()
    [10, 11, 12]
    """
    return x.index_select(dim, torch.argsort(_index(x, order, dim)))


def _index(x: Tensor, order: Sequence[int], dim: int) -> Tensor:
    index = torch.as_tensor(order, dtype=torch.int64, device=x.device)
    size = x.shape[dim]
    require(
        index.shape == (size,)
        and bool((index.sort().values == torch.arange(size).to(index)).all()),
        f"order must be a permutation of the {size} places of dimension {dim}",
        got=f"{len(order)} numbers",
        fix="take the order from a map of the same size",
        kind=ShapeError,
    )
    return index
