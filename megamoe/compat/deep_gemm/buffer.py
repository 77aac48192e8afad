"""SymmBuffer: where a caller puts its tokens before a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.compat.deep_gemm.kinds import (
    BUFFER,
    activation_of,
    check_fp8_dispatch,
    mma_named,
    refuse_old_switches,
    sorted_out,
)
from megamoe.compat.deep_gemm.prepared import forget_dropped
from megamoe.compat.deep_gemm.utils.math import align
from megamoe.errors import NotAvailable, RangeError, ShapeError, require
from megamoe.formats.quantized import DATA_DTYPE, SCALE_DTYPE, Quantized
from megamoe.formats.spec import Format, Scale, recipe_named
from megamoe.problem import Problem

TOKEN_ALIGN = 384  # upstream rounds max tokens up to this, and callers read the rounded number
LEAST_RING = (
    64  # SymmBuffer's 7th argument is a ring of tokens in DeepGEMM, shared experts in forks
)
BLOCK_M = 128  # `get_block_m_for_mega_moe`: rows of upstream's tiles, which nothing here has
_ROW_ALIGN = 16


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    dtype: torch.dtype
    width: int  # elements of a row


class SymmBuffer:
    """One allocation with views of the inputs; fill the first rows of each, then call.

    x             float8_e4m3fn [max tokens, hidden]; bfloat16 or packed uint8 for other `mma_type`s
    x_sf          int32 [max tokens, hidden / 128], four UE8M0 codes each (NVFP4: hidden / 64, four
                  E4M3 scales; Hopper's FP8: float32, one per 128 columns); None for BF16
    x_scales      NVFP4: float32 [max tokens], with `use_x_scales` a factor of each token
    topk_idx      int64 [max tokens, num_topk], -1 masks a slot
    topk_weights  float32 [max tokens, num_topk]
    shared_l1_acts_sf   int32 like x_sf, for callers that write it: shared experts read x and x_sf

    The pools between dispatch and combine are the engine's own: `l1_acts`, `l2_acts`, their scales
    and those of shared experts are None here. `base` shares the allocation of another buffer.
    """

    device: torch.device
    buffer: Tensor

    def __init__(
        self,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        mma_type: str = "fp8xfp4",
        activation: str = "swiglu",
        base: SymmBuffer | None = None,
        num_ring_tokens: int | None = None,
        *,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        args = sorted_out((num_shared_experts, mma_type, activation), BUFFER)
        num_shared, mma_type, activation = (
            args[name] for name in ("num_shared_experts", "mma_type", "activation")
        )
        if num_shared >= LEAST_RING:  # a ring of the engine's own is as long as it must be
            num_shared, num_ring_tokens = 0, num_shared
        activation_of(activation)
        refuse_old_switches()
        self.mma = mma_named(mma_type)
        check_fp8_dispatch(args["use_fp8_dispatch"], mma_type)
        self.group = group
        self.mma_type, self.recipe, self.backend = mma_type, self.mma.recipe, backend
        self.activation, self.num_shared_experts = activation, num_shared
        self.num_ring_tokens = num_ring_tokens
        require(
            num_shared == 0 or self.recipe in ("w4a8", "bf16"),
            "shared experts run beside fp8xfp4 and bf16xbf16",
            got=f"{num_shared} with {mma_type}",
            fix="leave them out and add their output to y",
            kind=NotAvailable,
        )
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
        self.device = _device(device if base is None else base.device)
        self.handle: Any = None
        self._looked: set[str] = set()
        parts = _parts(acts, hidden, num_topk, num_shared)
        self.buffer, views = _allocate(
            self.num_max_tokens_per_rank, parts, self.device, None if base is None else base.buffer
        )
        self.x, self.x_sf = views["x"], views.get("x_sf")
        x_scales = views.get("x_scales")
        self.x_scales = None if x_scales is None else x_scales[:, 0]
        self.topk_idx, self.topk_weights = views["topk_idx"], views["topk_weights"]
        self.shared_l1_acts_sf = views.get("shared_l1_acts_sf")
        self.l1_acts = self.l1_acts_sf = self.l2_acts = self.l2_acts_sf = None
        self.shared_l1_acts = self.shared_l2_acts = self.shared_l2_acts_sf = None

    def tokens(
        self, num_tokens: int, recipe: str | None = None, *, use_x_scales: bool = False
    ) -> Tensor | Quantized:
        """The first rows as the engine takes them in a recipe (the buffer's own); no copy."""
        data = self.x[:num_tokens]
        if self.x_sf is None:
            return data
        acts = recipe_named(recipe or self.recipe).acts
        data = data.view(DATA_DTYPE[acts.element.name])
        scale = self.x_sf[:num_tokens].view(SCALE_DTYPE[acts.scale])
        g = None
        if acts.has_global:
            assert self.x_scales is not None
            g = (
                self.x_scales[:num_tokens]
                if use_x_scales
                else torch.ones((), dtype=torch.float32, device=self.device)
            )
        return Quantized(data, scale, acts.name, (num_tokens, self.hidden), g)

    def check_scales(self, num_tokens: int, recipe: str) -> None:
        """Refuse scales of the other kind: FP32 bits read as UE8M0 codes, or the reverse.

        Both have 4 bytes per 128 columns. Read as the other, some are above 2**60, which no token
        needs. On a GPU, where looking waits, it is done in the first call of each kind.
        """
        is_gpu = self.device.type == "cuda"
        if recipe not in ("w4a8", "w4a4", "w8a8") or (is_gpu and recipe in self._looked):
            return
        if is_gpu and torch.cuda.is_current_stream_capturing():
            return
        self._looked.add(recipe)
        assert self.x_sf is not None
        rows = self.x_sf[:num_tokens][(self.topk_idx[:num_tokens] >= 0).any(dim=1)]
        if recipe == "w8a8":
            is_likely = bool((rows.view(torch.float32).abs() <= 2.0**60).all())
        else:
            codes = rows.view(torch.uint8)
            is_likely = bool(((codes <= 127 + 60) | (codes == 255)).all())  # 255 is NaN
        require(
            is_likely,
            "x_sf must hold " + ("float32" if recipe == "w8a8" else "four UE8M0 codes a word"),
            got="scales above 2**60: those of the other kind",
            fix="mega_moe_pre_dispatch_sm90 fills for fp8_mega_moe, mega_moe_pre_dispatch for the "
            "other calls",
            kind=RangeError,
        )

    def destroy(self) -> None:
        """Let go of the memory; the buffer is of no use afterwards."""
        self.group = self.handle = None
        for name in ("buffer", "x", "x_sf", "x_scales", "topk_idx", "topk_weights"):
            setattr(self, name, None)
        forget_dropped()


def get_symm_buffer_for_mega_moe(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
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
    mma_type         "fp8xfp4", "bf16xbf16", "mxf4xmxf4", "nvfp4xnvfp4" (docs/deep-gemm.md)
    device, backend  ours: where the buffer lies (None: the current GPU, else the CPU), and the
                     backend that computes
    What follows the sizes may come in the order of older releases too: (use_fp8_dispatch,
    mma_type, activation) or (use_fp8_dispatch, activation).
    """
    if use_fp8_dispatch in (0, 1):  # an integer at its place is no number of shared experts
        use_fp8_dispatch = bool(use_fp8_dispatch)
    args = sorted_out((num_shared_experts, use_fp8_dispatch, mma_type, activation), BUFFER)
    mma_named(args["mma_type"])
    check_fp8_dispatch(args.pop("use_fp8_dispatch"), args["mma_type"])
    return SymmBuffer(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden,
        **args, device=device, backend=backend,
    )  # fmt: skip


def get_symm_buffer_for_sm90_mega_moe(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: str = "swiglu",
    num_shared_experts: int = 0,
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
) -> SymmBuffer:
    """The buffer of `fp8_mega_moe`: FP8 tokens, x_sf float32 [max tokens, hidden / 128]."""
    require(
        use_fp8_dispatch, "tokens must be dispatched in FP8", got=use_fp8_dispatch,
        kind=NotAvailable,
    )  # fmt: skip
    return SymmBuffer(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden,
        num_shared_experts, "fp8xfp8_sm90", activation, device=device, backend=backend,
    )  # fmt: skip


def NVFP4SymmBuffer(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    **options: Any,
) -> SymmBuffer:
    """The buffer of vLLM's NVFP4 calls.

    Callers look for `num_shared_experts` among the names above before they pass shared experts,
    which do not run beside NVFP4 here: they then run theirs. `shared_dtype` goes with them.
    """
    options.pop("shared_dtype", None)
    return SymmBuffer(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden,
        mma_type="nvfp4", **options,
    )  # fmt: skip


def get_block_m_for_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_tokens: int,
    num_topk: int,
    mma_type: str = "fp8xfp4",
    global_num_tokens: int | None = None,
) -> int:
    """Rows by which callers lay out `shared_l1_acts_sf`, which is not read here."""
    mma_named(mma_type)
    return BLOCK_M


def get_block_m_for_nvfp4_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_tokens: int,
    num_topk: int,
    global_num_tokens: int | None = None,
) -> int:
    """The same for NVFP4."""
    return BLOCK_M


def num_ranks(group: Any) -> int:
    """Members of a process group; None is one."""
    return 1 if group is None else int(group.size())


def _parts(acts: Format, hidden: int, num_topk: int, num_shared: int) -> tuple[_Part, ...]:
    tokens = [_Part("x", torch.bfloat16, hidden)]
    if acts.scale is not Scale.NONE:
        packed = acts.element.bits == 4
        words = hidden // (acts.block[1] * (4 // SCALE_DTYPE[acts.scale].itemsize))
        tokens = [
            _Part("x", DATA_DTYPE[acts.element.name], hidden // 2 if packed else hidden),
            _Part("x_sf", torch.float32 if acts.scale is Scale.FP32 else torch.int32, words),
        ]
        if num_shared:
            tokens.append(_Part("shared_l1_acts_sf", torch.int32, words))
    if acts.has_global:
        tokens.append(_Part("x_scales", torch.float32, 1))
    slots = (
        _Part("topk_idx", torch.int64, num_topk),
        _Part("topk_weights", torch.float32, num_topk),
    )
    return (*tokens, *slots)


def _allocate(
    rows: int, parts: tuple[_Part, ...], device: torch.device, base: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """One zeroed allocation, or `base` as it is, and a view of each part in it."""
    sizes = [rows * part.width * part.dtype.itemsize for part in parts]
    starts = [0]
    for size in sizes:
        starts.append(align(starts[-1] + size, _ROW_ALIGN))
    buffer = torch.zeros(starts[-1], dtype=torch.int8, device=device) if base is None else base
    require(
        buffer.nbytes >= starts[-1] and buffer.device == device,
        f"the buffer that is shared must hold {starts[-1]} bytes on {device}",
        got=f"{buffer.nbytes} on {buffer.device}",
        kind=ShapeError,
    )
    return buffer, {
        part.name: buffer[start : start + size].view(part.dtype).view(rows, part.width)
        for part, start, size in zip(parts, starts, sizes, strict=False)
    }


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.empty(
            0, dtype=torch.float32, device=device
        ).device  # "cuda" is the current one
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
