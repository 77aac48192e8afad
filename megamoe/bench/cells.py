"""What `megamoe bench` measures, as data: layers, token counts, grouped GEMM shapes.

A *cell* is one layer at one number of tokens, written "flash-ep8/64", or "flash-ep8/64@24" where
exactly 24 experts are touched. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megamoe.bench.workloads import MODELS
from megamoe.errors import RangeError, one_of, require
from megamoe.problem import Options, check_touched

TOKENS = (8, 64, 512, 2048, 8192)  # decode to prefill

# With this seed the three smallest cells touch 25, 33 and 27 experts: as many as in the recorded
# runs of megamoe/bench/peers.json, so that a call reads the same bytes.
SEED = 127

AT = "@"  # before the experts touched
FEWEST, USUAL = 3, 6  # numbers of experts touched that a line goes through


@dataclass(frozen=True, slots=True)
class Shape:
    """The experts of one layer, all on one rank; the routed ones alone unless some are shared."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    options: Options = field(default_factory=Options)
    has_bias: bool = False
    tokens: tuple[int, ...] = TOKENS  # of its cells unless others are given
    num_shared: int = 0  # experts that see every token


@dataclass(frozen=True, slots=True)
class Cell:
    """A layer and a number of tokens."""

    shape: Shape
    num_tokens: int
    num_touched: int | None = None  # experts, evenly loaded; None: uniform routing

    @property
    def name(self) -> str:
        touched = "" if self.num_touched is None else f"{AT}{self.num_touched}"
        return f"{self.shape.name}/{self.num_tokens}{touched}"

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and a routed expert."""
        return self.num_tokens * self.shape.top_k

    @property
    def num_rows(self) -> int:
        """The rows both linears compute."""
        return self.num_pairs + self.num_tokens * self.shape.num_shared


# One rank's share of an expert-parallel layer over eight ranks: its experts, and tokens whose
# top_k experts all lie on it.
SHARES = {
    s.name: s
    for s in (
        Shape("flash-ep8", 4096, 2048, 32, 6),
        Shape("pro-ep8", 7168, 3072, 48, 6),
        Shape("v3-ep8", 7168, 2048, 32, 8),
    )
}
# With a shared expert besides, as these models have it.
SHARED = {
    f"{s.name}-shared": replace(s, name=f"{s.name}-shared", num_shared=1, tokens=TOKENS[:2])
    for s in SHARES.values()
}
# The shape of a public fused kernel's published times: benchmarks/h200/peers-public-48.json.
PUBLIC = {s.name: s for s in (Shape("public-48", 6144, 2048, 48, 8, tokens=(8, 32, 64, 128, 256)),)}
# One rank's share of what the published split kernels were timed on: 384 experts over eight ranks,
# or over four.
SPLIT = {
    s.name: s
    for s in (
        Shape(
            f"split-ep{ranks}-{width}", 7168, width, 384 // ranks, 6, Options(clamp=10.0),
            tokens=(16, 32, 64, 128, 512, 1024, 4096, 8192),
        )
        for ranks in (8, 4)
        for width in (3072, 2048)
    )
}  # fmt: skip
PRESETS = {
    m.name: Shape(m.name, m.hidden, m.intermediate, m.num_experts, m.top_k, m.options, m.has_bias)
    for m in MODELS.values()
}
SHAPES = SHARES | SHARED | PUBLIC | SPLIT | PRESETS


def cells_named(names: Sequence[str], tokens: Sequence[int] | None = None) -> tuple[Cell, ...]:
    """The cells of each name: "flash-ep8" at `tokens` (default its own), "flash-ep8/64" alone.

    >>> [cell.name for cell in cells_named(["v3-ep8/8", "public-48/8@34", "tiny"], [16])]
    ['v3-ep8/8', 'public-48/8@34', 'tiny/16']
    """
    require(len(names) > 0, "there must be at least one workload", got="none", kind=RangeError)
    cells: dict[str, Cell] = {}
    for name in names:
        shape_name, slash, count = name.partition("/")
        one_of(shape_name, tuple(SHAPES), "workload")
        shape = SHAPES[shape_name]
        count, at, touched = count.partition(AT)
        counts = [_count(count)] if slash else (shape.tokens if tokens is None else tokens)
        for num_tokens in counts:
            require(
                num_tokens >= 1,
                "a cell needs at least one token",
                got=num_tokens,
                kind=RangeError,
            )
            cell = _touching(Cell(shape, num_tokens), _count(touched) if at else None)
            cells[cell.name] = cell
    return tuple(cells.values())


def touching(cell: Cell, counts: Sequence[int] | None = None) -> tuple[Cell, ...]:
    """The cell with exactly so many experts touched; default: from top_k to all that it can.

    >>> [one.num_touched for one in touching(cells_named(["flash-ep8/64"])[0])]
    [6, 11, 16, 22, 27, 32]
    """
    if counts is None:
        low, high = cell.shape.top_k, min(cell.shape.num_experts, cell.num_pairs)
        counts = [round(low + (high - low) * at / (USUAL - 1)) for at in range(USUAL)]
    numbers = sorted(set(counts))
    cells = tuple(_touching(cell, number) for number in numbers)
    require(
        len(cells) >= FEWEST,
        f"a line needs at least {FEWEST} numbers of experts touched",
        got=f"{', '.join(map(str, numbers)) or 'none'} at {cell.name}",
        fix="take more tokens, or a shape with more experts than top_k",
        kind=RangeError,
    )
    return cells


def _touching(cell: Cell, num_touched: int | None) -> Cell:
    s = cell.shape
    if num_touched is not None:
        check_touched(num_touched, cell.num_tokens, s.num_experts, s.top_k)
    return replace(cell, num_touched=num_touched)


def _count(text: str) -> int:
    require(
        text.isdigit(),
        "a cell is written workload/tokens or workload/tokens@experts",
        got=repr(text),
        fix="for example flash-ep8/64 or flash-ep8/64@24",
        kind=RangeError,
    )
    return int(text)


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A grouped GEMM: group g multiplies rows[g] rows [., k] with its own matrix [n, k]."""

    name: str
    n: int
    k: int
    rows: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        return len(self.rows)

    @property
    def flops(self) -> int:
        return 2 * sum(self.rows) * self.n * self.k


# C011
UNEVEN_GEMMS = {
    s.name: s
    for s in (
        GemmShape("A", 4096, 7168, (80, 176, 128, 72, 64, 248, 96, 160)),
        GemmShape("B", 7168, 2048, (40, 76, 168, 72, 164, 148, 196, 160)),
        GemmShape("C", 3072, 4096, (192, 320)),
        GemmShape("D", 4096, 1536, (128, 384)),
    )
}
# Groups x rows of each: decode, where the stream of weights is the limit, and prefill.
EVEN_GEMMS = {
    s.name: s
    for s in (
        *(GemmShape(f"32x{rows}", 4096, 7168, (rows,) * 32) for rows in (8, 16, 32, 64)),
        GemmShape("8x1024", 4096, 7168, (1024,) * 8),
        GemmShape("8x4096", 7168, 2048, (4096,) * 8),
    )
}
GEMM_SHAPES = UNEVEN_GEMMS | EVEN_GEMMS


def gemms_named(names: Sequence[str]) -> tuple[GemmShape, ...]:
    """The grouped GEMM shapes of those names, or an error that lists the names."""
    require(len(names) > 0, "there must be at least one shape", got="none", kind=RangeError)
    for name in names:
        one_of(name, tuple(GEMM_SHAPES), "shape")
    return tuple(GEMM_SHAPES[name] for name in names)
