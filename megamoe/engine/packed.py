"""PackedMatrix: a linear of all experts held as Hopper's image, and nothing else (decision 0028).

It stands where a `Quantized` stands: `data` and `scale` give the canonical bytes,
unpacked then and there, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.engine import packing
from megamoe.engine.fingerprint import Seal, counter_of
from megamoe.errors import RangeError, require
from megamoe.formats.quantized import Quantized, empty
from megamoe.kernels.hopper.weights.pack import (
    Facts,
    Packed,
    Spare,
    empty_image,
    facts_of,
    spare_of,
    unpack,
    write,
)

ANY_IMAGE = Facts()
TENSORS = {"image": "data", "image_scale": "scale", "factor": "factor"}  # of a Packed


class Source:
    """Memory that a matrix was packed from: watched while others hold it, never held.

    Writes to it are seen as decision 0026 has it: counted ones in every call, others by content.
    """

    def __init__(self, matrix: Quantized) -> None:
        tensors = matrix.tensors()
        self._places: dict[str, _Place] = {
            name: _Place(StorageWeakRef(t.untyped_storage()), t.dtype, int(t.storage_offset()),
                         tuple(t.shape), t.stride())
            for name, t in tensors.items()
        }  # fmt: skip
        self._counters = [counter_of(t) for t in tensors.values()]
        self._versions = [t._version for t in self._counters]
        self._seal: Seal | None = Seal(list(tensors.values()))

    def part(self, idx: slice) -> Source:
        """Of some experts; without a look at the content."""
        one = copy(self)
        one._places, one._seal = {name: p.part(idx) for name, p in self._places.items()}, None
        return one

    def tensors(self) -> dict[str, Tensor]:
        """Those whose memory somebody holds."""
        tensors = {name: place.tensor() for name, place in self._places.items()}
        return {name: t for name, t in tensors.items() if t is not None}

    @property
    def is_gone(self) -> bool:
        """Whether no tensor of it is alive."""
        return not self._places

    def has_changed(self) -> bool:
        """Whether somebody wrote to memory that is still there; raises what `Seal` raises."""
        if not self._places:
            return False
        if all(place.storage.expired() for place in self._places.values()):
            self._places, self._counters, self._seal = {}, [], None
            return False
        if [t._version for t in self._counters] != self._versions:
            return True
        return self._seal is not None and not self._seal.content_holds(self._all_of_them)

    def accept(self) -> None:
        """What is there now was packed."""
        self._versions = [t._version for t in self._counters]
        tensors = self._all_of_them()
        self._seal = None if self._seal is None or tensors is None else Seal(tensors)

    def verify(self) -> None:
        """Look now, and refuse memory that was written to without being counted."""
        tensors = self._all_of_them()
        if self._seal is not None and tensors is not None:
            self._seal.verify(tensors)

    def _all_of_them(self) -> list[Tensor] | None:
        tensors = self.tensors()
        return list(tensors.values()) if len(tensors) == len(self._places) else None


class _Place(NamedTuple):
    """Where a tensor lies."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor | None:
        """It, while somebody holds the memory."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        with torch.inference_mode(False):
            t = torch.empty(0, dtype=self.dtype, device=storage.device)
            return t.set_(storage, self.offset, self.shape, self.stride)

    def part(self, idx: slice) -> _Place:
        if not self.shape:
            return self
        experts = range(self.shape[0])[idx]
        stride = (self.stride[0] * experts.step, *self.stride[1:])
        offset = self.offset + experts.start * self.stride[0]
        return self._replace(offset=offset, shape=(len(experts), *self.shape[1:]), stride=stride)


class _Known:
    """What is known of every expert of one memory."""

    def __init__(self, num: int, facts: Facts) -> None:
        self.spares, self.facts, self.writes = [Spare()] * num, [facts] * num, 0
        # copies that callers have, and of which experts
        self.lent: list[tuple[StorageWeakRef, Tensor, int, range]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lent": []}


class Aside:
    """What is known of each expert of an image, beside its bytes; runs of experts share it."""

    def __init__(self, num: int, facts: Facts = ANY_IMAGE) -> None:
        self._known, self._at = _Known(num, facts), range(num)
        self._facts: tuple[int, Facts] | None = None  # at so many writes

    def part(self, idx: slice) -> Aside:
        """Of a run of experts."""
        one = copy(self)
        one._at, one._facts = self._at[idx], None
        return one

    def spares(self) -> list[Spare]:
        """Of each expert, scales that its image does not hold."""
        return [self._known.spares[i] for i in self._at]

    def facts(self) -> Facts:
        """Which images would hold all of these experts."""
        if self._facts is None or self._facts[0] != self._known.writes:
            each = [self._known.facts[i] for i in self._at]
            self._facts = self._known.writes, Facts(*map(all, zip(*each, strict=True)))
        return self._facts[1]

    def facts_after(self, writes: Mapping[int, Facts]) -> Facts:
        """The same once some experts are others, of which these are the facts."""
        each = [writes.get(i, self._known.facts[at]) for i, at in enumerate(self._at)]
        return Facts(*map(all, zip(*each, strict=True)))

    def lend(self, t: Tensor) -> Tensor:
        """A copy that a caller gets: a write to it is refused by the next call, not lost."""
        counter = counter_of(t)
        ref = StorageWeakRef(t.untyped_storage())
        self._known.lent.append((ref, counter, counter._version, self._at))
        return t

    def refuse_written(self) -> None:
        """Raise if somebody wrote to a copy."""
        known = self._known
        if not known.lent:
            return
        require(
            all(counter._version == version for _, counter, version, _ in known.lent),
            "tensors of packed experts are copies, which nothing reads again",
            got="one that was written to",
            fix="write with layer.refresh(...), or before the experts are packed",
            kind=RangeError,
        )
        known.lent = [one for one in known.lent if not one[0].expired()]

    def forget_lent(self) -> None:
        """All of these experts were written anew: copies of what they were are the caller's own."""
        self._known.lent = [one for one in self._known.lent if one[3] != self._at]

    def put_all(
        self, experts: Sequence[int], spares: Sequence[Spare], facts: Sequence[Facts]
    ) -> None:
        """Say what some experts are now."""
        known = self._known
        for expert, spare, fact in zip(experts, spares, facts, strict=True):
            at = self._at[expert]
            known.spares[at], known.facts[at] = spare, fact
        known.writes += 1


# By address, experts and kind of an image: compiled models pass tensors, and what is watched is
# found again. The last one made stays: a matrix is made as the whole of an image that goes.
_BY_IMAGE: WeakValueDictionary[tuple[int, int, str], PackedMatrix] = WeakValueDictionary()


class PackedMatrix(Quantized):
    """An image in place of `Quantized` bytes.

    packed       the image, as kernels read it
    aside        what an image does not say of its experts
    global_ndim  NVFP4: dimensions of the canonical global scale
    source       the memory that it was packed from
    """

    __slots__ = ("__weakref__", "aside", "global_ndim", "packed", "source")

    packed: Packed
    aside: Aside
    global_ndim: int
    source: Source | None

    def __init__(
        self,
        packed: Packed,
        format: str,
        aside: Aside,
        global_ndim: int = 1,
        source: Source | None = None,
    ) -> None:
        lead = (2,) if packed.is_gated else ()
        shape = (len(packed.data), *lead, packed.num_outputs, packed.width)
        for name, value in (
            ("format", format), ("shape", shape), ("packed", packed), ("aside", aside),
            ("global_ndim", global_ndim), ("source", source),
        ):  # fmt: skip
            object.__setattr__(self, name, value)
        if packed.data.device.type != "meta":
            _BY_IMAGE[packed.data.data_ptr(), len(packed.data), packed.kind] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedMatrix, (self.packed, self.format, self.aside, self.global_ndim)

    def __repr__(self) -> str:
        return f"Quantized({self.format}, {self.shape}, {self.packed.kind} on {self.device})"

    @property
    def kind(self) -> str:
        """Which image it is: a row of `operands.WEIGHTS`."""
        return self.packed.kind

    @property
    def facts(self) -> Facts:
        """Which images would hold these values."""
        return self.aside.facts()

    # -- as a Quantized -------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        """The canonical values, unpacked."""
        return self.aside.lend(self.plain().data)

    @property
    def scale(self) -> Tensor | None:
        """The canonical scales, unpacked."""
        scale = self.plain().scale
        assert scale is not None
        return self.aside.lend(scale)

    @property
    def global_scale(self) -> Tensor | None:
        """NVFP4: the factors."""
        g = self._global_scale()
        return None if g is None else self.aside.lend(g)

    def _global_scale(self) -> Tensor | None:
        if self.packed.factor_is != "expert":
            return None
        factor = self.packed.factor
        assert factor is not None
        while factor.ndim > self.global_ndim:  # gate and up have one, or all experts
            factor = factor[..., 0]
        return factor.clone(memory_format=torch.contiguous_format)

    @property
    def device(self) -> torch.device:
        return self.packed.data.device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.held().values())

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.aside.lend(t) for name, t in self.plain().tensors().items()}

    def to(self, device: torch.device | str) -> Quantized:
        """The images on another GPU; elsewhere the canonical bytes."""
        if torch.device(device).type != "cuda":
            return self.plain(device)
        return self.mapped(lambda t: t.to(device))

    def __getitem__(self, idx: int | slice) -> Quantized:
        if not isinstance(idx, slice):
            return plain(self[idx : idx + 1 or None])[0]
        source = None if self.source is None else self.source.part(idx)
        image, aside = _part(self.packed, idx), self.aside.part(idx)
        return PackedMatrix(image, self.format, aside, self.global_ndim, source)

    # -- as an image ----------------------------------------------------------------------------

    def held(self) -> dict[str, Tensor]:
        """The tensors of the image by name."""
        named = {name: getattr(self.packed, key) for name, key in TENSORS.items()}
        return {name: t for name, t in named.items() if t is not None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> PackedMatrix:
        """The same with every tensor of the image changed, such as moved."""
        tensors = {TENSORS[name]: change(t) for name, t in self.held().items()}
        image = replace(self.packed, **tensors)  # type: ignore[arg-type]
        return PackedMatrix(image, self.format, deepcopy(self.aside), self.global_ndim)

    def plain(self, device: torch.device | str | None = None) -> Quantized:
        """The canonical bytes, exactly, made expert by expert."""
        where = self.device if device is None else torch.device(device)
        with torch.inference_mode(False), torch.no_grad():
            out, spares = empty(self.shape, self.spec, where), self.aside.spares()
            for expert in range(len(self)):
                one = unpack(self.packed, spares, self.format, expert)
                for name, t in one.tensors().items():
                    if name != "global_scale":
                        getattr(out, name)[expert].copy_(t[0])
        g = self._global_scale()
        return out if g is None else replace(out, global_scale=g.to(where))

    def write(self, expert: int, w: Quantized) -> None:
        """Another expert [1, ...], which this kind of image can hold, in place of one."""
        write(self.packed, expert, w)
        has_spare = self.kind in ("e4m3_image", "placed_image")
        self.aside.put_all([expert], [spare_of(w) if has_spare else Spare()], [facts_of(w)])

    def as_kind(self, kind: str, num: int) -> PackedMatrix:
        """Another kind of image of the first `num` experts, in the same memory but for scales."""
        image = empty_image(kind, self.shape, self.device, self.packed.data)
        matrix = PackedMatrix(image, self.format, Aside(len(self)), self.global_ndim)
        spares = self.aside.spares()
        for expert in range(num):
            matrix.write(expert, unpack(self.packed, spares, self.format, expert))
        return matrix

    def renewed(self) -> Quantized:
        """The canonical bytes as the source has them now; what is gone, as it was packed."""
        tensors = {} if self.source is None else self.source.tensors()
        return replace(self.plain(), **tensors)  # type: ignore[arg-type]


def plain(matrix: Quantized) -> Quantized:
    """The canonical bytes of a matrix."""
    return matrix.plain() if isinstance(matrix, PackedMatrix) else matrix


def empty_matrix(kind: str, like: Quantized, num: int, device: torch.device) -> PackedMatrix:
    """An image for `num` experts like those of a matrix, to be written."""
    image = empty_image(kind, (num, *like.shape[1:]), device)
    g = like.global_scale
    ndim = 1 if g is None else g.ndim
    return PackedMatrix(image, like.format, Aside(num), ndim)


def fill(out: PackedMatrix, w: Quantized, first: int = 0) -> None:
    """Write the experts of `w`, from wherever they lie, one by one."""
    with torch.no_grad(), torch.inference_mode(False):
        if packing.is_gpu(out.device) and w.device == out.device and not is_packed(w):
            packing.write(out, range(first, first + len(w)), w)
            return
        for expert in range(len(w)):
            one = w[expert : expert + 1]
            one = one.plain(out.device) if isinstance(one, PackedMatrix) else one.to(out.device)
            packing.write(out, [first + expert], one)


def is_packed(matrix: Quantized) -> bool:
    """Whether it is held as an image."""
    return isinstance(matrix, PackedMatrix)


def parts_of(both: PackedMatrix, nums: Sequence[int]) -> list[PackedMatrix]:
    """Runs of experts, as parts of the same memory."""
    parts, first = [], 0
    for num in nums:
        part = both[first : first + num]
        assert isinstance(part, PackedMatrix)
        parts.append(part)
        first += num
    return parts


def pictured(matrix: Quantized) -> list[Any] | None:
    """What an image is beside its tensors, for JSON; None for canonical bytes."""
    if not isinstance(matrix, PackedMatrix):
        return None
    image = matrix.packed
    how = image.kind, image.factor_is, image.num_outputs, image.width, image.is_gated
    return [*how, matrix.format, matrix.global_ndim, list(matrix.facts)]


def from_picture(picture: list[Any], tensors: dict[str, Tensor]) -> PackedMatrix:
    """The matrix of an image's tensors: the one that has them, or another to compute with."""
    kind, *how, format, global_ndim, facts = picture
    data = tensors["image"]
    known = _BY_IMAGE.get((data.data_ptr(), len(data), kind))
    if known is not None and known.device == data.device:
        return known
    others = [
        one.kind
        for (address, num, _), one in list(_BY_IMAGE.items())
        if (address, num) == (data.data_ptr(), len(data)) and one.device == data.device
    ]
    require(
        not others,
        f"an image must be the {kind} that its call was made for",
        got=" and ".join(others),
        fix="compile the layer again after its experts were replaced",
        kind=RangeError,
    )
    image = Packed(kind, *(tensors.get(name) for name in TENSORS), *how)  # type: ignore[arg-type]
    return PackedMatrix(image, format, Aside(len(image.data), Facts(*facts)), global_ndim)


def _part(image: Packed, idx: slice) -> Packed:
    tensors = {name: t[idx] for name in TENSORS.values() if (t := getattr(image, name)) is not None}
    return replace(image, **tensors)
