"""Weights in the published layouts, and the engine's experts made of them once.

`transform_weights_for_mega_moe` brings a caller's tensors into the layout that the published kernel
loads: rows of gate and up interleaved, and within each 128 rows of packed scales row r at
(r % 32) * 4 + r // 32. `prepare` reads that layout back into ExpertWeights. It remembers them by
the storage of the L1 values, under a seal (decision 0026), so views and Parameters of the same
memory find them and in-place changes make them anew; when the caller drops the storage they go too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.compat.deep_gemm.handle import Handle, holder_of
from megamoe.compat.deep_gemm.kinds import MMA, activation_of, mma_named
from megamoe.engine.fingerprint import Seal, counted
from megamoe.engine.layer import MoE
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError, require

GATE_UP_ROWS = 8
PACKED_ROWS = 16  # of packed FP4 MMAs: even rows of gate, of up, then the odd ones
SCALE_ROWS = 128
FP8_BLOCK = 128
_MX_VALUES, _NV_VALUES = 128, 64  # that one int32 of scales covers

Packed = tuple[Tensor, Tensor]  # int8 [E, rows, k / 2] and int32 [E, rows, k / 128]
Weights = Tensor | Packed


@dataclass(slots=True)
class Prepared:
    """Experts, and the layers that were asked of them."""

    experts: ExpertWeights
    seal: Seal  # of the source tensors
    is_packed: bool  # the order of L1's rows
    layers: dict[tuple[Any, ...], MoE] = field(default_factory=dict)

    def layer(self, recipe: str, num_experts: int, top_k: int, group: Any, **options: Any) -> MoE:
        """The layer of these experts in one recipe of their weight format, made once."""
        key = (recipe, num_experts, top_k, group, *sorted(options.items()))
        if key not in self.layers:
            own = self.experts.recipe
            experts = self.experts if recipe == own else replace(self.experts, recipe=recipe)
            self.layers[key] = MoE(experts, num_experts, top_k, group=group, **options)
            if experts.is_packed:  # the canonical bytes go: other layers have these images too
                self.experts = experts if recipe == own else replace(experts, recipe=own)
        return self.layers[key]


Key = tuple[Any, ...]  # a StorageWeakRef first
_PREPARED: dict[Key, Prepared] = {}
_IS_PACKED: dict[Key, bool] = {}  # by L1: how `transform_weights_for_mega_moe` laid it out


class Source(NamedTuple):
    """A caller's weights, checked: BF16 values, FP8 in blocks, or packed FP4 with packed scales."""

    l1: Tensor  # [E, 2I, stored columns]
    l1_scale: Tensor | None
    l2: Tensor  # [E, H, stored columns]
    l2_scale: Tensor | None
    recipe: str

    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        return [t for t in self[:4] if t is not None]

    def roles(self) -> dict[str, Tensor | None]:
        """Its parts by name."""
        return {"l1": self.l1, "l1_scale": self.l1_scale, "l2": self.l2, "l2_scale": self.l2_scale}

    def key(self) -> Key:
        """Where L1's values lie."""
        storage = StorageWeakRef(self.l1.untyped_storage())
        return storage, self.l1.data_ptr(), tuple(self.l1.shape)


class Alphas(NamedTuple):
    """NVFP4's global scales as calls give them; None is 1.

    l1        factor of L1's sums: float32 [E], or [E, 2] of gate and up
    l2        factor of L2's sums, the activations' scale in it: float32 [E]
    l2_act    the scale that L2's input is quantised with: float32 [E] or one number
    is_divisor   l2_act is its reciprocal
    """

    l1: Tensor | None = None
    l2: Tensor | None = None
    l2_act: Tensor | float | None = None
    is_divisor: bool = False

    def tensors(self) -> list[Tensor]:
        """Those that are tensors."""
        return [t for t in self[:3] if isinstance(t, Tensor)]

    def factors(self, num_experts: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Global scales of w13, w2 and the activations: each multiplies."""
        ones = torch.ones(num_experts, dtype=torch.float32, device=device)
        w13, l2 = (ones if t is None else t.detach().float() for t in (self.l1, self.l2))
        acts = ones if self.l2_act is None else ones * self.l2_act
        if self.is_divisor:
            acts = acts.reciprocal()
        return w13, l2 / acts, acts


def transform_weights_for_mega_moe(
    l1_weights: Weights,
    l2_weights: Weights,
    activation: str = "swiglu",
    mma_type: str = "fp8xfp4",
    *,
    keep: bool = True,
) -> tuple[Weights, Weights]:
    """Bring weights into the published layout, and prepare the engine's experts from it.

    l1_weights  bfloat16 [E, 2I, H], gate rows then up rows; or (int8 [E, 2I, H / 2], int32
                [E, 2I, H / 128], NVFP4: H / 64) as `per_token_cast_to_fp4` and
                `transform_sf_into_required_layout` make them; shared experts, [2S, H], without E,
                may be (float8_e4m3fn, int32) too
    l2_weights  bfloat16 [E, H, I], or the same pair for it
    mma_type    that of the buffer: packed FP4 MMAs ("mxf4xmxf4", "nvfp4xnvfp4") have L1 in another
                order
    keep        ours: False has the engine hold the experts alone. The tensors that are returned
                are handles, which calls take and which refuse to be read or written; drop
                `l2_weights` too, whose values are shared. Not for NVFP4 and shared experts
    returns     the same types and shapes: L1's rows interleaved, scales permuted, L2's values as
                they are; under inference mode too they are tensors whose writes torch counts
    """
    activation_of(activation)
    packed = mma_named(mma_type).is_packed
    with torch.inference_mode(False), torch.no_grad():
        if _rank(l1_weights) == 2:
            _check_keep(keep, "shared experts, which no engine holds")
            return _transform(l1_weights, l2_weights, packed)
        source = read_source(l1_weights, l2_weights)
        _check_keep(keep or source.recipe != "nvfp4", "NVFP4, whose factors come with the call")
        l1, l2 = _transform(l1_weights, l2_weights, packed)
        experts = read_source(l1, l2)
        if not keep:
            return _handles(experts, packed)
        _IS_PACKED[experts.key()] = packed
        if source.recipe != "nvfp4":  # its global scales come with the call
            prepare(experts, packed)
    return l1, l2


def transform_weights_for_mega_moe_sm90(
    l1_weights: Packed, l2_weights: Packed, *, keep: bool = True
) -> tuple[Packed, Packed]:
    """(float8_e4m3fn [E, 2I, H], float32 [E, 2I / 128, H / 128]): L1's values interleaved by 8.

    Scales stay as they are, those of gate before those of up; `keep` is as above.
    """
    source = read_source(l1_weights, l2_weights)
    require(
        source.recipe == "w8a8",
        "weights must be float8_e4m3fn with float32 scales per 128 x 128",
        got=source.l1.dtype,
        fix="FP4 weights go to transform_weights_for_mega_moe",
        kind=DTypeError,
    )
    with torch.inference_mode(False), torch.no_grad():
        l1 = interleave(source.l1), counted(l1_weights[1])
        l2 = counted(source.l2), counted(l2_weights[1])
        if not keep:
            return _handles(read_source(l1, l2), False)  # type: ignore[return-value]
        prepare(read_source(l1, l2), False)
    return l1, l2


def _handles(source: Source, is_packed: bool) -> tuple[Weights, Weights]:
    """The experts of transformed weights, and handles in place of those."""
    holder = Prepared(_experts(source, is_packed, Alphas()), Seal(()), is_packed)
    one, scale, two, scale_2 = (
        None if t is None else Handle.of(t, holder, role) for role, t in source.roles().items()
    )
    assert one is not None and two is not None
    if scale is None or scale_2 is None:
        return one, two
    return (one, scale), (two, scale_2)


def _check_keep(ok: bool, what: str) -> None:
    require(ok, "keep=False is for routed experts in MXFP4, FP8 or BF16", got=what,
            fix="leave keep out", kind=NotAvailable)  # fmt: skip


def transform_scales_for_mega_moe(l1_scales: Tensor, l2_scales: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4's packed scales, gate rows then up rows, in the layout of "nvfp4xnvfp4"."""
    return permute_scales(interleave_packed(l1_scales)), permute_scales(l2_scales)


def prepare(source: Source, is_packed: bool, alphas: Alphas | None = None) -> Prepared:
    """The engine's experts of transformed weights, made once; in a recipe of their format."""
    holder: Prepared | None = holder_of(source.roles())
    key = () if holder else source.key()
    known = holder.is_packed if holder else _IS_PACKED.get(key, is_packed)
    require(
        known == is_packed,
        "weights must be transformed for the mma_type of the buffer",
        got=f"L1 rows in runs of {PACKED_ROWS if known else GATE_UP_ROWS}",
        fix="give transform_weights_for_mega_moe the buffer's mma_type: "
        + " and ".join(n for n, m in MMA.items() if m.is_packed)
        + " have another order of rows",
        kind=RangeError,
    )
    if holder is not None:
        return holder
    alphas = alphas or Alphas()
    number = None if isinstance(alphas.l2_act, Tensor | None) else float(alphas.l2_act)
    key = (*key, is_packed, alphas.l1 is None, alphas.l2 is None, alphas.l2_act is None, number)
    tensors = [*source.tensors(), *alphas.tensors()]
    prepared = _PREPARED.get(key)
    if prepared is None or not prepared.seal.holds(tensors):
        forget_dropped()
        prepared = _PREPARED[key] = Prepared(
            _experts(source, is_packed, alphas), Seal(tensors), is_packed
        )
    return prepared


def forget_dropped() -> None:
    """Let go of experts whose source the caller has dropped."""
    for cache in (_PREPARED, _IS_PACKED):
        for key in list(cache):
            if key[0].expired():
                del cache[key]


def read_source(l1: object, l2: object) -> Source:
    """Require two BF16 stacks, or two pairs of values and scales, that fit."""
    parts: list[Any] = []
    for weights in (l1, l2):
        parts += weights if isinstance(weights, (tuple, list)) else (weights, None)
    pairs = [isinstance(weights, (tuple, list)) for weights in (l1, l2)]
    require(
        len(parts) == 4 and pairs[0] == pairs[1],
        "weights must be two tensors, or two pairs of values and scales",
        got=f"{type(l1).__name__} and {type(l2).__name__}",
        kind=DTypeError,
    )
    one, recipe = _check_matrix("l1_weights", *parts[:2])
    two, other = _check_matrix("l2_weights", *parts[2:])
    require(
        recipe == other
        and two == (one[0], one[2], one[1] // 2)
        and one[1] % (2 * GATE_UP_ROWS) == 0,
        f"l1_weights must be [E, 2I, H] and l2_weights [E, H, I] in one format, I a multiple of "
        f"{GATE_UP_ROWS}",
        got=f"{one} in {recipe} and {two} in {other}",
        kind=ShapeError,
    )
    require(
        recipe != "w8a8" or one[1] % (2 * FP8_BLOCK) == 0,
        f"I must be a multiple of {FP8_BLOCK}: gate and up must not share a scale",
        got=one[1] // 2,
        kind=ShapeError,
    )
    return Source(*parts, recipe)  # type: ignore[call-arg]


def _check_matrix(name: str, data: object, scale: object) -> tuple[tuple[int, int, int], str]:
    """[E, rows, columns] of one checked weight, and a recipe of its format."""
    legal = (torch.bfloat16,) if scale is None else (torch.int8, torch.uint8, torch.float8_e4m3fn)
    require(
        isinstance(data, Tensor) and data.dtype in legal,
        f"{name} must be {' or '.join(map(str, legal))}",
        got=getattr(data, "dtype", type(data).__name__),
        kind=DTypeError,
    )
    assert isinstance(data, Tensor)
    require(
        data.ndim == 3 and data.is_contiguous(),
        f"{name} must be a contiguous [E, rows, columns]",
        got=f"shape {tuple(data.shape)}, strides {data.stride()}",
        kind=ShapeError,
    )
    experts, rows, cols = data.shape
    if scale is None:
        return (experts, rows, cols), "bf16"
    is_fp8 = data.dtype == torch.float8_e4m3fn
    require(
        isinstance(scale, Tensor) and scale.dtype == (torch.float32 if is_fp8 else torch.int32),
        f"{name}: scales must be " + ("float32" if is_fp8 else "int32, four codes each"),
        got=getattr(scale, "dtype", type(scale).__name__),
        fix="" if is_fp8 else "call transform_sf_into_required_layout",
        kind=DTypeError,
    )
    assert isinstance(scale, Tensor)
    if is_fp8:
        wanted = experts, rows // FP8_BLOCK, cols // FP8_BLOCK
        require(
            rows % FP8_BLOCK == cols % FP8_BLOCK == 0 and tuple(scale.shape) == wanted,
            f"{name}: scales must be one per {FP8_BLOCK} x {FP8_BLOCK}, {wanted}",
            got=f"values {tuple(data.shape)}, scales {tuple(scale.shape)}",
            kind=ShapeError,
        )
        return (experts, rows, cols), "w8a8"
    cols *= 2
    shapes = {
        (experts, rows, cols // _MX_VALUES): "w4a8",
        (experts, rows, cols // _NV_VALUES): "nvfp4",
    }
    require(
        rows % SCALE_ROWS == 0 and tuple(scale.shape) in shapes,
        f"{name}: rows must be a multiple of {SCALE_ROWS} and scales one of {list(shapes)}",
        got=f"values {tuple(data.shape)}, scales {tuple(scale.shape)}",
        kind=ShapeError,
    )
    return (experts, rows, cols), shapes[tuple(scale.shape)]  # type: ignore[index]


def _rank(weights: object) -> int:
    first = weights[0] if isinstance(weights, (tuple, list)) else weights
    return getattr(first, "ndim", 0)


def _transform(l1: Weights, l2: Weights, is_packed: bool) -> tuple[Weights, Weights]:
    mix = interleave_packed if is_packed else interleave
    if isinstance(l1, Tensor):
        assert isinstance(l2, Tensor)
        return interleave(l1), counted(l2)
    return (mix(l1[0]), permute_scales(mix(l1[1]))), (counted(l2[0]), permute_scales(l2[1]))


def interleave(t: Tensor, gran: int = GATE_UP_ROWS) -> Tensor:
    """[(E,) gate then up, k] -> [(E,) 8 gate rows, 8 up rows, ..., k], strides kept."""
    return torch.empty_like(t).copy_(_swap(_stack(t), 2, -1, gran).view(t.shape))


def interleave_packed(t: Tensor) -> Tensor:
    """[(E,) gate then up, k] -> 16 rows of each at a time: even gate, even up, odd gate, odd up."""
    rows = _stack(t)
    require(
        rows.shape[1] % (2 * PACKED_ROWS) == 0,
        f"gate and up must each have a multiple of {PACKED_ROWS} rows",
        got=tuple(t.shape),
        kind=ShapeError,
    )
    groups, _, cols = rows.shape
    grid = rows.reshape(groups, 2, -1, PACKED_ROWS // 2, 2, cols)  # half, run, pair, parity
    return torch.empty_like(t).copy_(grid.permute(0, 2, 4, 1, 3, 5).reshape(t.shape))


def permute_scales(sf: Tensor) -> Tensor:
    """Row r of each 128 goes to (r % 32) * 4 + r // 32, strides kept."""
    require(
        sf.dtype == torch.int32 and sf.shape[-2] % SCALE_ROWS == 0,
        f"packed scales must be int32, rows a multiple of {SCALE_ROWS}",
        got=f"{sf.dtype} {tuple(sf.shape)}",
        kind=ShapeError,
    )
    blocks = sf.reshape(-1, SCALE_ROWS, sf.shape[-1])
    return torch.empty_like(sf).copy_(_swap(blocks, 4, 32, 1).view(sf.shape))


def split(t: Tensor, is_packed: bool = False) -> Tensor:
    """The inverse of `interleave`, or of `interleave_packed`."""
    rows = _stack(t)
    if not is_packed:
        return _swap(rows, -1, 2, GATE_UP_ROWS).view(t.shape)
    groups, _, cols = rows.shape
    grid = rows.reshape(groups, -1, 2, 2, PACKED_ROWS // 2, cols)  # run, parity, half, pair
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(t.shape)


def codes(words: Tensor) -> Tensor:
    """Permuted words [(E,) rows, n] -> the bytes of scales [(E,) rows, 4 n]."""
    blocks = words.reshape(-1, SCALE_ROWS, words.shape[-1])
    return _swap(blocks, 32, 4, 1).contiguous().view(words.shape).view(torch.uint8)


def _stack(t: Tensor) -> Tensor:
    return t if t.ndim == 3 else t.unsqueeze(0)


def _swap(rows: Tensor, outer: int, inner: int, run: int) -> Tensor:
    """Runs of rows read as [outer, inner], written as [inner, outer]."""
    batch, num_rows, cols = rows.shape
    grid = rows.reshape(batch, outer, inner, run, cols)
    return grid.transpose(1, 2).reshape(batch, num_rows, cols)


def _experts(source: Source, is_packed: bool, alphas: Alphas) -> ExpertWeights:
    """Transformed weights as ExpertWeights; L2's values are shared, the rest is copied."""
    l1, l2 = split(source.l1, is_packed), source.l2.detach()
    if source.l1_scale is None or source.l2_scale is None:
        return ExpertWeights.from_quantized(l1, None, l2, None, recipe="bf16")
    if source.recipe == "w8a8":
        scales = source.l1_scale.detach(), source.l2_scale.detach()
        return ExpertWeights.from_quantized(l1, scales[0], l2, scales[1], recipe="w8a8")
    scales = split(codes(source.l1_scale), is_packed), codes(source.l2_scale)
    if source.recipe == "w4a8":
        return ExpertWeights.from_quantized(l1, scales[0], l2, scales[1], recipe="w4a8")
    scales = scales[0].view(torch.float8_e4m3fn), scales[1].view(torch.float8_e4m3fn)
    w13, w2, acts = alphas.factors(len(l1), l1.device)
    return ExpertWeights.from_quantized(
        l1, scales[0], l2, scales[1], recipe="nvfp4", w13_global=w13, w2_global=w2,
        acts_global=acts,
    )  # fmt: skip
