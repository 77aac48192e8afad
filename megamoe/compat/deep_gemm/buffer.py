"""SymmBuffer: where a caller puts its tokens before a call."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.compat.deep_gemm.prepared import check_activation, forget_dropped
from megamoe.compat.deep_gemm.utils.math import align
from megamoe.errors import RangeError, ShapeError, one_of, require
from megamoe.formats.quantized import DATA_DTYPE, Quantized
from megamoe.formats.spec import Format, Scale, recipe_named
from megamoe.problem import Problem

TOKEN_ALIGN = 384  # upstream rounds max tokens up to this, and callers read the rounded number
_ROW_ALIGN = 16

RECIPE_OF = {"fp8xfp4": "w4a8", "bf16xbf16": "bf16", "mxf4xmxf4": "w4a4"}


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    dtype: torch.dtype
    width: int  # elements of a row


class SymmBuffer:
    """One allocation with views of the inputs; fill the first rows of each, then call.

    x             float8_e4m3fn [max tokens, hidden]; bfloat16 or packed int8 for other `mma_type`s
    x_sf          int32 [max tokens, hidden / 128], four UE8M0 codes each; None for BF16
    topk_idx      int64 [max tokens, num_topk], -1 masks a slot
    topk_weights  float32 [max tokens, num_topk]

    The pools between dispatch and combine are the engine's own: `l1_acts`, `l2_acts` and their
    scales are None here.
    """

    def __init__(
        self,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        mma_type: str = "fp8xfp4",
        activation: str = "swiglu",
        *,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        check_activation(activation)
        one_of(mma_type, tuple(RECIPE_OF), "mma_type")
        self.group = group
        self.mma_type, self.recipe, self.backend = mma_type, RECIPE_OF[mma_type], backend
        Problem(
            num_max_tokens_per_rank, hidden, intermediate_hidden, num_experts, num_topk,
            num_ranks(group), self.recipe,
        )  # fmt: skip
        acts = recipe_named(self.recipe).acts
        require(
            acts.scale is Scale.NONE or (hidden % 128 == 0 and intermediate_hidden % 128 == 0),
            "hidden and intermediate_hidden must be multiples of 128: four scales are one word",
            got=f"{hidden} and {intermediate_hidden}",
            kind=ShapeError,
        )
        self.num_experts, self.num_topk = num_experts, num_topk
        self.num_max_tokens_per_rank = align(num_max_tokens_per_rank, TOKEN_ALIGN)
        self.hidden, self.intermediate_hidden = hidden, intermediate_hidden
        self.device = _device(device)
        self.handle: Any = None
        self.buffer, views = _allocate(
            self.num_max_tokens_per_rank, _parts(acts, hidden, num_topk), self.device
        )
        self.x, self.x_sf = views["x"], views.get("x_sf")
        self.topk_idx, self.topk_weights = views["topk_idx"], views["topk_weights"]
        self.l1_acts = self.l1_acts_sf = self.l2_acts = self.l2_acts_sf = None

    def tokens(self, num_tokens: int) -> Tensor | Quantized:
        """The first rows as the engine takes them; no copy."""
        data = self.x[:num_tokens]
        if self.x_sf is None:
            return data
        acts = recipe_named(self.recipe).acts
        data = data.view(DATA_DTYPE[acts.element.name])
        scale = self.x_sf[:num_tokens].view(torch.uint8)
        return Quantized(data, scale, acts.name, (num_tokens, self.hidden))

    def destroy(self) -> None:
        """Let go of the memory; the buffer is of no use afterwards."""
        self.group = self.handle = None
        for name in ("buffer", "x", "x_sf", "topk_idx", "topk_weights"):
            setattr(self, name, None)
        forget_dropped()


def get_symm_buffer_for_mega_moe(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
) -> SymmBuffer:
    """A buffer for calls of up to `num_max_tokens_per_rank` tokens, rounded up to 384.

    group            torch.distributed process group; None is one rank
    num_experts      over all ranks
    mma_type         "fp8xfp4", "bf16xbf16", or "mxf4xmxf4" (FP4 tokens too)
    device, backend  ours: where the buffer lies (None: the current GPU, else the CPU), and the
                     backend that computes
    """
    one_of(mma_type, tuple(RECIPE_OF), "mma_type")
    if use_fp8_dispatch is not None:
        require(
            use_fp8_dispatch == mma_type.startswith("fp8"),
            f"use_fp8_dispatch must agree with mma_type {mma_type}",
            got=use_fp8_dispatch,
            fix="leave it out; mma_type says it all",
            kind=RangeError,
        )
        warnings.warn("use_fp8_dispatch is old: give mma_type", DeprecationWarning, stacklevel=2)
    return SymmBuffer(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden,
        mma_type, activation, device=device, backend=backend,
    )  # fmt: skip


def num_ranks(group: Any) -> int:
    """Members of a process group; None is one."""
    return 1 if group is None else int(group.size())


def _parts(acts: Format, hidden: int, num_topk: int) -> tuple[_Part, ...]:
    tokens = [_Part("x", torch.bfloat16, hidden)]
    if acts.scale is not Scale.NONE:
        packed = acts.element.bits == 4
        dtype = torch.int8 if packed else torch.float8_e4m3fn
        tokens = [
            _Part("x", dtype, hidden // 2 if packed else hidden),
            _Part("x_sf", torch.int32, hidden // 128),
        ]
    slots = (
        _Part("topk_idx", torch.int64, num_topk),
        _Part("topk_weights", torch.float32, num_topk),
    )
    return (*tokens, *slots)


def _allocate(
    rows: int, parts: tuple[_Part, ...], device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """One zeroed allocation, and a view of each part in it."""
    sizes = [rows * part.width * part.dtype.itemsize for part in parts]
    starts = [0]
    for size in sizes:
        starts.append(align(starts[-1] + size, _ROW_ALIGN))
    buffer = torch.zeros(starts[-1], dtype=torch.int8, device=device)
    return buffer, {
        part.name: buffer[start : start + size].view(part.dtype).view(rows, part.width)
        for part, start, size in zip(parts, starts, sizes, strict=False)
    }


def _device(given: torch.device | str | None) -> torch.device:
    if given is not None:
        return torch.empty(0, device=given).device  # "cuda" is the current one
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
