"""Comparing results the way DeepGEMM's tests do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 <x, y> / (<x, x> + <y, y>) in float64: 0 where equal, and where both are zero.

    >>> import torch
    >>> calc_diff(torch.ones(3), torch.ones(3)), calc_diff(torch.zeros(3), torch.zeros(3))
    (0.0, 0.0)
    """
    x, y = x.double(), y.double()
    norms = float((x * x + y * y).sum())
    return 0.0 if norms == 0 else 1.0 - 2.0 * float((x * y).sum()) / norms


def assert_bitwise_equal(x: Tensor, y: Tensor, label: str = "") -> None:
    """Raise AssertionError unless both have one shape, one dtype and the same bytes."""
    where = f" ({label})" if label else ""
    assert x.shape == y.shape, f"shapes differ{where}: {tuple(x.shape)} and {tuple(y.shape)}"
    assert x.dtype == y.dtype, f"dtypes differ{where}: {x.dtype} and {y.dtype}"
    bytes_of = [t.contiguous().flatten().view(torch.uint8) for t in (x, y)]
    differs = (bytes_of[0] != bytes_of[1]).nonzero()
    assert len(differs) == 0, (
        f"bytes differ{where}: {len(differs)} of {bytes_of[0].numel()}, "
        f"the first at element {int(differs[0]) // x.element_size()}"
    )


def count_bytes(*tensors: Any) -> int:
    """Bytes of all tensors, those in tuples and lists too; None counts nothing."""
    total = 0
    for t in tensors:
        if isinstance(t, (tuple, list)):
            total += count_bytes(*t)
        elif t is not None:
            total += t.numel() * t.element_size()
    return total
