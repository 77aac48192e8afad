"""Regions and the Workspace: named pieces of one allocation, chained one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from megamoe.errors import RangeError, ShapeError, require

DTYPE_BYTES = {"u8": 1, "bf16": 2, "u32": 4, "i32": 4, "f32": 4, "u64": 8, "i64": 8}

TMA_ALIGN = 16  # A055: rows and segments that TMA touches
SEGMENT_ALIGN = 128  # one cache line: two segments never share one


def align_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return (value + multiple - 1) // multiple * multiple


def ceil_div(value: int, by: int) -> int:
    """Division rounded up, for non-negative integers."""
    return (value + by - 1) // by


@dataclass(frozen=True, slots=True)
class Segment:
    """A region that has no place yet: what is wanted."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    section: str  # "control": words of the protocol; "data": rows and scales
    about: str = ""
    is_cleaned: bool = False  # zero between calls: the call that used it zeroes it again
    align: int = SEGMENT_ALIGN

    @property
    def num_bytes(self) -> int:
        """Bytes of the array; a format without scales asks for none."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Region:
    """One named array in the allocation: `num_bytes` at `offset`, row-major `shape` of `dtype`."""

    name: str
    offset: int
    num_bytes: int
    align: int
    dtype: str = "u8"
    shape: tuple[int, ...] = ()
    section: str = "data"
    about: str = ""
    is_cleaned: bool = False

    @property
    def end(self) -> int:
        """The first byte after the region."""
        return self.offset + self.num_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    def at(self, *index: int) -> int:
        """Byte offset, from the start of the allocation, of one element.

        >>> Region("a", 128, 96, 16, "u64", (3, 4)).at(1, 2)
        176
        """
        require(
            len(index) == len(self.shape)
            and all(0 <= i < n for i, n in zip(index, self.shape, strict=True)),
            f"an index into {self.name} must lie inside {self.shape}",
            got=index,
            kind=RangeError,
        )
        flat = 0
        for i, n in zip(index, self.shape, strict=True):
            flat = flat * n + i
        return self.offset + flat * self.item_bytes


@dataclass(frozen=True, slots=True)
class Workspace:
    """The one symmetric allocation of a rank: its regions in order of address."""

    regions: tuple[Region, ...]
    num_bytes: int  # of the whole allocation, a multiple of SEGMENT_ALIGN
    _by_name: dict[str, Region] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        by_name = {region.name: region for region in self.regions}
        require(
            len(by_name) == len(self.regions),
            "region names must differ",
            got=[region.name for region in self.regions],
            kind=RangeError,
        )
        object.__setattr__(self, "_by_name", by_name)

    def __getitem__(self, name: str) -> Region:
        require(
            name in self._by_name,
            f"a workspace has the regions {', '.join(self._by_name)}",
            got=repr(name),
            kind=RangeError,
        )
        return self._by_name[name]

    def section(self, name: str) -> tuple[Region, ...]:
        """The regions of one section, "control" or "data"."""
        return tuple(region for region in self.regions if region.section == name)

    @property
    def control_bytes(self) -> int:
        """Bytes from the start that must be zero before the first call."""
        return max((region.end for region in self.section("control")), default=0)

    def __str__(self) -> str:
        head = f"{'region':<24}{'offset':>14}{'bytes':>16}  {'type':<5} shape"
        rows = [
            f"{r.name:<24}{r.offset:>14,}{r.num_bytes:>16,}  {r.dtype:<5} "
            + " x ".join(map(str, r.shape))
            for r in self.regions
        ]
        return "\n".join([head, *rows, f"{'total':<24}{'':>14}{self.num_bytes:>16,}"])


def chain(segments: Iterable[Segment]) -> Workspace:
    """Place the segments one after the other, each at its own alignment.

    To change a size is to change one segment: everything after it moves by itself (A048).
    """
    regions: list[Region] = []
    end = 0
    for wanted in segments:
        _check(wanted)
        offset = align_up(end, wanted.align)
        end = offset + wanted.num_bytes
        regions.append(
            Region(
                name=wanted.name,
                offset=offset,
                num_bytes=wanted.num_bytes,
                align=wanted.align,
                dtype=wanted.dtype,
                shape=wanted.shape,
                section=wanted.section,
                about=wanted.about,
                is_cleaned=wanted.is_cleaned,
            )
        )
    return Workspace(tuple(regions), align_up(end, SEGMENT_ALIGN))


def _check(wanted: Segment) -> None:
    require(
        wanted.dtype in DTYPE_BYTES,
        f"the type of {wanted.name} must be one of {', '.join(DTYPE_BYTES)}",
        got=wanted.dtype,
        kind=RangeError,
    )
    require(
        all(n >= 0 for n in wanted.shape),
        f"the shape of {wanted.name} must not be negative",
        got=wanted.shape,
        kind=ShapeError,
    )
    require(
        wanted.align % DTYPE_BYTES[wanted.dtype] == 0 and wanted.align & (wanted.align - 1) == 0,
        f"the alignment of {wanted.name} must be a power of two and hold its type",
        got=wanted.align,
        kind=ShapeError,
    )
