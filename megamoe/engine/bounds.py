"""What a layer was built for, held against a call: its top_k, its tokens, one device."""

from __future__ import annotations

from torch import Tensor

from megamoe.errors import CapacityError, DeviceError, DTypeError, ShapeError, require
from megamoe.formats.quantized import Quantized


def check_num_experts(topk_idx: Tensor, top_k: int | None) -> None:
    """Refuse ids of more or fewer experts a token than the layer has; None: any number."""
    require(
        top_k is None or topk_idx.shape[1] == top_k,
        f"topk_idx must be [T, {top_k}]",
        got=tuple(topk_idx.shape),
        kind=ShapeError,
    )


def check_bound(max_tokens: int, most: int | None) -> None:
    """Refuse what cannot be the bound of a call."""
    require(
        isinstance(max_tokens, int) and not isinstance(max_tokens, bool),
        "max_tokens must be an integer",
        got=repr(max_tokens),
        kind=DTypeError,
    )
    limit = "" if most is None else f" and max_tokens_per_rank = {most}"
    require(
        max_tokens >= 0 and (most is None or max_tokens <= most),
        f"max_tokens must lie between 0{limit}",
        got=max_tokens,
        fix="all ranks pass the tokens of the fullest rank, or more",
        kind=CapacityError,
    )


def check_fits(x: Tensor | Quantized, max_tokens: int | None, limit: int | None) -> None:
    """Refuse more tokens than a call may have.

    max_tokens  of this call; None: those of the layer
    limit       those of the layer; None: any number
    """
    name = "max_tokens_per_rank"
    if max_tokens is not None:
        check_bound(max_tokens, limit)
        limit, name = max_tokens, "max_tokens"
    require(
        limit is None or x.shape[0] <= limit,
        f"a call may hold at most {name} = {limit} tokens",
        got=x.shape[0],
        fix="split the batch or build the layer for more",
        kind=CapacityError,
    )


def check_devices(*tensors: Tensor) -> None:
    """Refuse operands on several devices: with one of them on meta nothing would be computed."""
    devices = {t.device for t in tensors}
    require(
        len(devices) == 1,
        "tokens, ids, weights and the layer must lie on one device",
        got=sorted(map(str, devices)),
        fix="move the layer with .to(device), or load its weights before it is compiled",
        kind=DeviceError,
    )
