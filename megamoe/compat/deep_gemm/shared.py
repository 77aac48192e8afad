"""Shared experts: a gated MLP that every token goes through, beside the launch.

Upstream runs them in its own launch, with weights in BF16, MXFP4 or MXFP8. Here they are two BF16
products: tokens, weights and requantised activations of those formats are all exact in BF16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.compat.deep_gemm.prepared import SCALE_ROWS, Weights, codes, split
from megamoe.engine.fingerprint import Seal
from megamoe.engine.gates import gated
from megamoe.errors import DTypeError, ShapeError, require
from megamoe.formats.quantize import dequantize, quantize
from megamoe.formats.quantized import Quantized
from megamoe.problem import Options


class _Prepared(NamedTuple):
    w13: Tensor  # bfloat16 [2S, H], gate rows then up rows
    w2: Tensor  # bfloat16 [H, S]
    seal: Seal


_PREPARED: dict[tuple[StorageWeakRef, int, int], _Prepared] = {}


def shared_rows(
    l1: Weights, l2: Weights, x: Tensor | Quantized, width: int, options: Options
) -> Tensor:
    """float32 [T, H]: what the shared experts, `width` wide together, add to each token.

    l1, l2   as `transform_weights_for_mega_moe` made them of [2S, H] and [H, S]
    """
    experts = _prepared(l1, l2, width)
    tokens = (x if isinstance(x, Tensor) else dequantize(x)).bfloat16()
    with torch.autocast(tokens.device.type, enabled=False):  # the products are BF16's
        gate, up = (tokens @ experts.w13.mT).float().chunk(2, dim=1)
        acts = gated(options.activation, options.clamp, gate, up)
        if not isinstance(x, Tensor):
            acts = dequantize(quantize(acts, x.format))
        return (acts.bfloat16() @ experts.w2.mT).float()


def _prepared(l1: Weights, l2: Weights, width: int) -> _Prepared:
    pairs = [w if isinstance(w, (tuple, list)) else (w,) for w in (l1, l2)]
    tensors = [t for pair in pairs for t in pair]
    first = tensors[0]
    key = StorageWeakRef(first.untyped_storage()), first.data_ptr(), width
    for old in [k for k in _PREPARED if k[0].expired()]:
        del _PREPARED[old]
    prepared = _PREPARED.get(key)
    if prepared is None or not prepared.seal.holds(tensors):
        values = [_values(pair, name) for pair, name in zip(pairs, ("l1", "l2"), strict=True)]
        hidden = values[1].shape[0]
        require(
            tuple(values[0].shape) == (2 * width, hidden) and values[1].shape[1] == width,
            f"shared_l1_weights must be [{2 * width}, H] and shared_l2_weights [H, {width}]",
            got=f"{tuple(values[0].shape)} and {tuple(values[1].shape)}",
            kind=ShapeError,
        )
        prepared = _PREPARED[key] = _Prepared(split(values[0]), values[1], Seal(tensors))
    return prepared


def _values(pair: tuple[Tensor, ...], name: str) -> Tensor:
    """bfloat16 [rows, columns], exact."""
    data = pair[0]
    if len(pair) == 1:
        require(
            data.dtype == torch.bfloat16 and data.ndim == 2,
            f"shared_{name}_weights must be a bfloat16 matrix, or values and scales",
            got=f"{data.dtype} {tuple(data.shape)}",
            kind=DTypeError,
        )
        return data.detach()
    is_fp8 = data.dtype == torch.float8_e4m3fn
    require(
        is_fp8 or data.dtype in (torch.int8, torch.uint8),
        f"shared_{name}_weights must be float8_e4m3fn, or FP4 packed in int8",
        got=data.dtype,
        kind=DTypeError,
    )
    rows, cols = data.shape[0], data.shape[1] * (1 if is_fp8 else 2)
    words = pair[1]
    require(
        words.dtype == torch.int32
        and rows % SCALE_ROWS == 0
        and tuple(words.shape) == (rows, cols // 128),
        f"shared_{name}_weights: scales must be int32 {(rows, cols // 128)}, four UE8M0 codes each",
        got=f"{words.dtype} {tuple(words.shape)}",
        kind=ShapeError,
    )
    data = data if is_fp8 else data.view(torch.uint8)
    stored = Quantized(data, codes(words), "mxfp8" if is_fp8 else "mxfp4", (rows, cols))
    return dequantize(stored).bfloat16()
