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


def refuse_shared(names: Sequence[str], held: dict[str, Values]) -> None:
    """Refuse to write to experts of which one lies where another lies: both would change.

    names  of what is written
    """
    places = [(name, t) for name, matrix in held.items() for _, t in _parts(matrix)]
    for i, (name, t) in enumerate(places):
        others = [other for j, (other, u) in enumerate(places) if i != j and share(t, u)]
        require(
            name not in names or not (others or _overlaps_itself(t)),
            "experts that are written must each have memory of their own",
            got=f"{name} in the memory of {', '.join([*others, *([] if others else [name])])}",
            fix="clone the tensors before the layer is built (expand shares one expert's memory)",
            kind=RangeError,
        )


def share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share bytes; each expert's may lie beside the other's."""
    if not _overlap(a, b):
        return False
    if a.ndim == 0 or b.ndim == 0 or len(a) < 2 or len(b) < 2:
        return True
    step = a.stride(0) * a.element_size()
    if step != b.stride(0) * b.element_size() or step == 0:
        return True
    apart = (b.data_ptr() - a.data_ptr()) % step
    return apart < _end(a[0]) - a.data_ptr() or step - apart < _end(b[0]) - b.data_ptr()


def _overlaps_itself(t: Tensor) -> bool:
    """Whether two indices may be one place, as in what `expand` makes."""
    end = 1
    for step, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and step < end:
            return True
        end += (size - 1) * step
    return False


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
