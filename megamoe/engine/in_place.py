"""Images over the canonical bytes that they are made from: beside the weights lies one expert.

It is done where those bytes would be freed at once if the experts dropped them: then nothing else
reads them. A tensor, a view, a storage or an exchange object of them elsewhere changes the
reference count of their storage; images are made beside them instead.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from megamoe.engine import packing
from megamoe.engine.packed import Aside, PackedMatrix
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized, empty
from megamoe.kernels.hopper.weights import pack
from megamoe.kernels.hopper.weights.pack import Packed

SAME_SCALES = ("placed_image", "mx_image", "nv_image")  # their size is that of canonical ones


def packed(weights: ExpertWeights, name: str, kind: str) -> PackedMatrix | None:
    """A canonical matrix of experts as an image in its own memory, and out of `weights`; None where
    that is not to be done: then all is as it was."""
    device = weights.device
    if not _is_gpu(device):
        return None
    memory = _Memory.of(getattr(weights, name), kind)
    if memory is None:
        return None
    facts = packing.facts_each(getattr(weights, name))
    if packing.is_gpu(device):
        packing.agrees(kind, len(memory.shape) == 4, device)  # compiles
    copy = empty((1, *memory.shape[1:]), memory.fmt, device)
    object.__setattr__(weights, name, None)
    image, last = None, -1  # `copy` is this expert
    try:
        if not memory.is_alone():
            weights._replace_parts(**{name: memory.canonical()})
            return None
        image = memory.image()
        _synchronise(device)  # other streams may still read
        for expert in range(len(image)):
            copy = memory.copied(expert, copy)
            last = expert
            packing.write(image, [expert], copy, [facts[expert]])
    except BaseException:
        if image is not None:
            memory.restore(image, last, copy)
        weights._replace_parts(**{name: memory.canonical()})
        raise
    return image


class _Memory:
    """Canonical bytes that belong to one matrix alone, as far as can be seen."""

    def __init__(self, matrix: Quantized, kind: str) -> None:
        self.shape, self.fmt, self.kind = matrix.shape, matrix.spec, kind
        self._tensors = {name: _alias(t) for name, t in matrix.tensors().items()}

    @classmethod
    def of(cls, matrix: Quantized, kind: str) -> _Memory | None:
        """The memory, if tensors fill their storages and the image has their size; else None."""
        image = pack.empty_image(kind, matrix.shape, torch.device("meta"))
        assert image.scale is not None and matrix.scale is not None
        fits = matrix.data.nbytes == image.data.nbytes and (
            kind not in SAME_SCALES or matrix.scale.nbytes == image.scale.nbytes
        )
        return (
            cls(matrix, kind) if fits and all(map(_is_whole, matrix.tensors().values())) else None
        )

    def is_alone(self) -> bool:
        """Whether nothing else reads these bytes, or could write to them."""
        if all(map(_is_sole, self._tensors.values())):
            return True
        gc.collect()  # reference cycles
        return all(map(_is_sole, self._tensors.values()))

    def canonical(self) -> Quantized:
        """The matrix, of the same bytes."""
        tensors = {name: _alias(t) for name, t in self._tensors.items()}
        return Quantized(format=self.fmt.name, shape=self.shape, **tensors)

    def image(self) -> PackedMatrix:
        """The image that is to be written there."""
        like = pack.empty_image(self.kind, self.shape, torch.device("meta"))
        assert like.scale is not None
        data = _words(self._tensors["data"], tuple(like.data.shape))
        scale = factor = None
        with torch.inference_mode(False):
            if self.kind in SAME_SCALES:
                scale = _words(self._tensors["scale"], tuple(like.scale.shape))
            else:
                scale = torch.empty(like.scale.shape, dtype=torch.int32, device=data.device)
            if like.factor is not None:
                factor = torch.empty(like.factor.shape, dtype=torch.float32, device=data.device)
        packed = Packed(
            self.kind, data, scale, factor, like.factor_is, like.num_outputs, like.width,
            like.is_gated,
        )  # fmt: skip
        g = self._tensors.get("global_scale")
        return PackedMatrix(packed, self.fmt.name, Aside(len(data)), 1 if g is None else g.ndim)

    def copied(self, expert: int, into: Quantized) -> Quantized:
        """One canonical expert [1, ...], in memory that there is for it."""
        source = self.canonical()[expert : expert + 1]
        _copy(source, into)
        return replace(into, global_scale=source.global_scale)

    def restore(self, image: PackedMatrix, last: int, last_bytes: Quantized) -> None:
        """Undo: unpack experts to canonical bytes again; those after `last` were not packed.

        last        being packed when packing failed; -1: none was
        last_bytes  its canonical bytes, [1, ...]
        """
        canonical, spares = self.canonical(), image.aside.spares()
        for expert in range(last + 1):
            source = last_bytes
            if expert < last:
                source = pack.unpack(image.packed, spares, image.format, expert)
            _copy(source, canonical[expert : expert + 1])


def _copy(source: Quantized, into: Quantized) -> None:
    """Values and scales."""
    assert into.scale is not None and source.scale is not None
    with torch.no_grad():
        into.data.copy_(source.data)
        into.scale.copy_(source.scale)


def _alias(t: Tensor) -> Tensor:
    """Another tensor of the same storage, whose writes count with those of `t`."""
    with torch.inference_mode(False), torch.no_grad():
        return t.detach()


def _words(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of its own over the bytes of another, as int32."""
    with torch.inference_mode(False), torch.no_grad():
        out = torch.empty(0, dtype=torch.int32, device=t.device)
        return out.set_(
            t.untyped_storage(),
            0,
            shape,
            torch.empty(shape, dtype=torch.float32, device="meta").stride(),
        )


def _is_whole(t: Tensor) -> bool:
    """Whether a tensor is all of its storage, in order."""
    return (
        t.is_contiguous() and t.storage_offset() == 0 and t.nbytes == t.untyped_storage().nbytes()
    )


def _is_sole(t: Tensor) -> bool:
    """Whether a tensor alone refers to its storage, and that is torch's own memory."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or not _is_torchs(t.untyped_storage()):
        return False
    fresh = torch.empty(1, dtype=torch.uint8, device=t.device)
    fresh.untyped_storage()  # as often as that of `t`: a storage keeps its Python object
    return _references(t, count) == _references(fresh, count)


def _references(t: Tensor, count: Callable[[int], int]) -> tuple[int, int]:
    """References to the storage, and to its Python object."""
    storage = t.untyped_storage()
    return count(storage._cdata), sys.getrefcount(storage)


def _is_torchs(storage: UntypedStorage) -> bool:
    """Whether torch allocated it for itself: not another library, and no other process sees it."""
    if storage.device.type != "cuda":
        return True
    is_standard: Any = getattr(torch._C, "_has_Standard_Deleter", None)
    return is_standard is not None and bool(is_standard(storage._cdata))


def _is_gpu(device: torch.device) -> bool:
    return packing.is_gpu(device)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
