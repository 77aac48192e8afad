"""Whether what is to be written to experts lies in the memory that it is written to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megamoe.engine.packed import PackedMatrix
from megamoe.errors import RangeError, require
from megamoe.formats.quantized import Quantized

Values = Tensor | Quantized | None


def refuse(values: dict[str, Values], held: dict[str, Values], experts: Sequence[int]) -> None:
    """Refuse tensors in memory that a refresh writes, unless every expert lies where it goes: an
    expert might be read after another was written over it.

    values   by name, what is written: [n, ...]
    held     by name, where it is written, at places `experts`
    """
    is_run = (
        list(experts) == list(range(experts[0], experts[0] + len(experts))) if experts else True
    )
    names = [name for name, t in values.items() if t is not None]
    places = [(name, part, t) for name in names for part, t in _parts(held[name])]
    for name in names:
        for part, t in _parts(values[name]):
            for other, its, place in places:
                if not _overlap(t, place):
                    continue
                is_there = is_run and (name, part) == (other, its) and t.dtype == place.dtype
                require(
                    is_there and t.data_ptr() == place[experts[0]].data_ptr()
                    and t.is_contiguous() and place.is_contiguous(),
                    f"{name} must not lie in the memory that is written, other than where it goes",
                    got=f"a view of the layer's {other}",
                    fix="clone it",
                    kind=RangeError,
                )  # fmt: skip


def _parts(t: Values) -> list[tuple[str, Tensor]]:
    """The tensors of a matrix or a bias by name."""
    if t is None or isinstance(t, Tensor):
        return [] if t is None else [("data", t)]
    one = t.packed if isinstance(t, PackedMatrix) else t
    names = ("data", "scale", "factor" if isinstance(t, PackedMatrix) else "global_scale")
    return [(name, part) for name in names if (part := getattr(one, name)) is not None]


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether some byte may belong to both."""
    if a.device != b.device or a.is_meta or a.numel() == 0 or b.numel() == 0:
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(t: Tensor) -> int:
    """The address after the last of its bytes."""
    last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr() + (last + 1) * t.element_size()
