"""Weights in the published layout, and the engine's experts made of them once.

`transform` brings a caller's tensors into the layout that the published kernel loads: rows of gate
and up interleaved by 8, and within each 128 rows of packed scales row r at (r % 32) * 4 + r // 32.
`prepare` reads that layout back into ExpertWeights. It remembers them by the storage of the L1
values, under a seal (decision 0026), so views and Parameters of the same memory find them and
in-place changes make them anew; when the caller drops the storage they go too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.engine.fingerprint import Seal, counted
from megamoe.engine.layer import MoE
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, ShapeError, require

GATE_UP_ROWS = 8
SCALE_ROWS = 128

Packed = tuple[Tensor, Tensor]  # int8 [E, rows, k / 2] and int32 [E, rows, k / 128]
Weights = Tensor | Packed


@dataclass(slots=True)
class Prepared:
    """Experts, and the layers that were asked of them."""

    experts: ExpertWeights
    seal: Seal  # of the source tensors
    layers: dict[tuple[Any, ...], MoE] = field(default_factory=dict)

    def layer(self, recipe: str, num_experts: int, top_k: int, group: Any, **options: Any) -> MoE:
        """The layer of these experts in one recipe of their weight format, made once."""
        key = (recipe, num_experts, top_k, group, *sorted(options.items()))
        if key not in self.layers:
            experts = replace(self.experts, recipe=recipe)
            self.layers[key] = MoE(experts, num_experts, top_k, group=group, **options)
        return self.layers[key]


_PREPARED: dict[tuple[StorageWeakRef, int, tuple[int, ...]], Prepared] = {}


class Source(NamedTuple):
    """A caller's weights, checked: bfloat16 values, or packed FP4 with packed scales."""

    l1: Tensor  # [E, 2I, stored columns]
    l1_scale: Tensor | None
    l2: Tensor  # [E, H, stored columns]
    l2_scale: Tensor | None


def transform_weights_for_mega_moe(
    l1_weights: Weights, l2_weights: Weights, activation: str = "swiglu"
) -> tuple[Weights, Weights]:
    """Bring weights into the published layout, and prepare the engine's experts from it.

    l1_weights  bfloat16 [E, 2I, H], gate rows then up rows; or (int8 [E, 2I, H / 2], int32
                [E, 2I, H / 128]) as `per_token_cast_to_fp4` and
                `transform_sf_into_required_layout` make them
    l2_weights  bfloat16 [E, H, I], or the same pair for it
    returns     the same types and shapes: L1's rows interleaved, scales permuted, L2's values as
                they are; under inference mode too they are tensors whose writes torch counts
    """
    check_activation(activation)
    given = read_source(l1_weights, l2_weights)
    with torch.inference_mode(False), torch.no_grad():
        l1, l2 = _interleave(given.l1), counted(given.l2)
        if given.l1_scale is None or given.l2_scale is None:
            prepare(l1, l2)
            return l1, l2
        l1_pair = (l1, _permute_scales(_interleave(given.l1_scale)))
        l2_pair = (l2, _permute_scales(given.l2_scale))
        prepare(l1_pair, l2_pair)
    return l1_pair, l2_pair


def prepare(l1_weights: Weights, l2_weights: Weights) -> Prepared:
    """The engine's experts of transformed weights, made once; recipe bf16 or w4a8."""
    source = read_source(l1_weights, l2_weights)
    storage = StorageWeakRef(source.l1.untyped_storage())  # type: ignore[no-untyped-call]
    key = (storage, source.l1.data_ptr(), tuple(source.l1.shape))
    tensors = [t for t in source if t is not None]
    found = _PREPARED.get(key)
    if found is None or not found.seal.holds(tensors):
        forget_dropped()
        found = _PREPARED[key] = Prepared(_experts(source), Seal(tensors))
    return found


def forget_dropped() -> None:
    """Let go of experts whose source the caller has dropped."""
    for key in list(_PREPARED):
        if key[0].expired():  # type: ignore[no-untyped-call]
            del _PREPARED[key]


def check_activation(activation: str) -> None:
    """Upstream's kernels know one activation."""
    require(
        activation == "swiglu",
        "activation must be swiglu",
        got=repr(activation),
        fix='other activations: mm.moe(activation="gpt_oss")',
        kind=NotAvailable,
    )


def read_source(l1: object, l2: object) -> Source:
    """Require two BF16 stacks, or two pairs of packed FP4 values and packed scales, that fit."""
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
    source = Source(*parts)
    one = _check_matrix("l1_weights", source.l1, source.l1_scale, is_packed=pairs[0])
    two = _check_matrix("l2_weights", source.l2, source.l2_scale, is_packed=pairs[0])
    require(
        two == (one[0], one[2], one[1] // 2) and one[1] % (2 * GATE_UP_ROWS) == 0,
        f"l1_weights must be [E, 2I, H] and l2_weights [E, H, I], I a multiple of {GATE_UP_ROWS}",
        got=f"{one} and {two}",
        kind=ShapeError,
    )
    return source


def _check_matrix(
    name: str, data: object, scale: object, *, is_packed: bool
) -> tuple[int, int, int]:
    """[E, rows, columns] of one checked weight."""
    legal = (torch.int8, torch.uint8) if is_packed else (torch.bfloat16,)
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
    if not is_packed:
        return experts, rows, cols
    require(
        isinstance(scale, Tensor) and scale.dtype == torch.int32,
        f"{name}: scales must be int32, four UE8M0 codes each",
        got=getattr(scale, "dtype", type(scale).__name__),
        fix="call transform_sf_into_required_layout",
        kind=DTypeError,
    )
    assert isinstance(scale, Tensor)
    require(
        rows % SCALE_ROWS == 0 and tuple(scale.shape) == (experts, rows, cols // 64),
        f"{name}: rows must be a multiple of {SCALE_ROWS} and scales {(experts, rows, cols // 64)}",
        got=f"values {tuple(data.shape)}, scales {tuple(scale.shape)}",
        kind=ShapeError,
    )
    return experts, rows, 2 * cols


def _interleave(rows: Tensor) -> Tensor:
    """[E, gate then up, k] -> [E, 8 gate rows, 8 up rows, ..., k], strides kept."""
    return torch.empty_like(rows).copy_(_swap(rows, 2, -1, GATE_UP_ROWS))


def _split(rows: Tensor) -> Tensor:
    """The inverse of `_interleave`."""
    return _swap(rows, -1, 2, GATE_UP_ROWS)


def _permute_scales(words: Tensor) -> Tensor:
    """Row r of each 128 goes to (r % 32) * 4 + r // 32, strides kept."""
    blocks = words.reshape(-1, SCALE_ROWS, words.shape[2])
    return torch.empty_like(words).copy_(_swap(blocks, 4, 32, 1).view(words.shape))


def _codes(words: Tensor) -> Tensor:
    """Permuted words [E, rows, k / 128] -> E8M0 codes [E, rows, k / 32]."""
    blocks = words.reshape(-1, SCALE_ROWS, words.shape[2])
    return _swap(blocks, 32, 4, 1).contiguous().view(words.shape).view(torch.uint8)


def _swap(rows: Tensor, outer: int, inner: int, run: int) -> Tensor:
    """Runs of rows read as [outer, inner], written as [inner, outer]."""
    batch, num_rows, cols = rows.shape
    grid = rows.reshape(batch, outer, inner, run, cols)
    return grid.transpose(1, 2).reshape(batch, num_rows, cols)


def _experts(source: Source) -> ExpertWeights:
    """Transformed weights as ExpertWeights; L2's values are shared, the rest is copied."""
    l1, l2 = _split(source.l1), source.l2.detach()
    if source.l1_scale is None or source.l2_scale is None:
        return ExpertWeights.from_quantized(l1, None, l2, None, recipe="bf16")
    return ExpertWeights.from_quantized(
        l1, _split(_codes(source.l1_scale)), l2, _codes(source.l2_scale), recipe="w4a8"
    )
