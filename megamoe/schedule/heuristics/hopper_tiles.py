"""Hopper's staged launches: the tile of each linear, by recipe and load, with measured reasons.

Measured on H200 (132 SMs), 2026-11-15 and 16, torch 2.11.0+cu130, triton 3.6.0, over one EP8 rank's
share of DeepSeek-V4-Flash, -Pro and -V3.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.formats.spec import recipe_named
from megamoe.layout.regions import align_up

SHARED_BYTES = 232448 - 4096  # what a CTA may have, less notes and the compiler's scratch
MOST_STAGES = 12
GROUPS = 2  # math warpgroups of a CTA
# Stages of weights that a fused launch has in flight once what others left in L2 is written back,
# 9 MB of all CTAs. w4a8_block, after a memset and after a read: flash at 8 tokens 95.6 and 88.2 us,
# 97.4 and 90.0 with a whole ring of six; 48 experts at 32 tokens, 23 of them met, 126.2 and 121.8,
# 126.9 and 123.4 with five. Where FP4 becomes BF16 math is the limit and wants the whole ring:
# w4a16 flash at 8 tokens 109.1 and 106.6, 109.7 and 107.6 with two stages.
WINDOW = 2
INF = float("inf")


@dataclass(frozen=True, slots=True)
class Swapped:
    """A launch with weights as wgmma's M: the tile of one CTA and how its ring is cut."""

    tokens: int  # of a tile
    slabs: int  # of 64 weight rows, for each of two warpgroups
    depth: int  # K blocks of 128 per stage
    stages: int
    span: int = 1  # token tiles that share each tile of weights
    is_stream: bool = True  # weights leave L2 first: no tile that follows reads them again
    window: int = 0  # stages that a fused launch has in flight; 0: as many as there are
    math_regs: int = 232
    load_regs: int = 40

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return 64 * GROUPS * self.slabs

    def __str__(self) -> str:
        return f"{self.tokens}x{self.rows} tokens x rows, {self.stages} stages"


@dataclass(frozen=True, slots=True)
class Straight:
    """A launch with tokens as wgmma's M: 128 tokens x 256 weight rows, FP8."""

    stages: int
    images: int = 1  # stages of the ring of FP4 images, or of jobs that decode ahead
    span: int = 8
    math_regs: int = 232
    decode_regs: int = 0  # of the warpgroup that decodes FP4
    load_regs: int = 40
    is_dealt: bool = False  # tiles are dealt before the launch, so that half ones spread evenly
    is_drawn: bool = False  # CTAs draw their tiles, and L2 follows L1 tile by tile; w8a8
    ahead: int = 0  # K blocks of each ring that FP4 is decoded into once for many tiles; dealt too
    tokens: int = 128

    @property
    def is_in_waves(self) -> bool:
        """Whether its items are written down before the launch."""
        return self.is_dealt or self.is_drawn or self.ahead > 0

    def __str__(self) -> str:
        how = ", dealt" * self.is_dealt + ", drawn" * self.is_drawn
        if self.ahead:
            how = f", decoded {self.ahead} blocks ahead"
        return f"{self.tokens}x256 tokens x rows, tokens first, {self.stages} stages{how}"


Tile = Swapped | Straight

_FP4 = ("w4a16", "w4a8", "w4a4", "nvfp4")  # decoded to BF16
_BF16 = (*_FP4, "bf16")
# fmt: off
# (recipes, mean rows per expert up to, tile, why). The first row that fits wins. A swapped tile is
# (tokens, slabs, K blocks a stage, span, stream): an edge lies where a busy expert (mean + 2 sigma of
# random routing) still fits. With FP8 activations a tile is 256 rows, since 128 outputs share a
# scale. Weights are a stream with fewer than 64 tokens, or as told.
TILES: tuple[tuple[tuple[str, ...], float, tuple[int, ...] | Straight, str], ...] = (
    (("w4a8_block",), 4.0,  (8, 2, 2),        "the stream of weights is the limit; fused flash at 8 tokens 96.4 us, 97.2 with four warpgroups of one slab"),
    (("w4a8_block",), 13.0, (16, 2, 2),       "fused flash at 64 tokens 118.7 us, 119.0 with four warpgroups of one slab, which took 127 with 32 tokens"),
    (("w4a8_block",), 22.5, (32, 2, 2),       "v3 at 64 tokens: fused 191.3 us, 196.1 with four warpgroups of one slab; staged 205.5, 210.3 with one K block a stage"),
    (("w4a8_block",), 70.0, (64, 2, 2, 1, 1), "43 rows an expert (48 of 6144 x 2048) 322.6 us, 328.6 where weights are no stream, 335.2 with four warpgroups; 64 rows (pro at 512 tokens) 820.3, 827.9, 852.4"),
    (("w4a8_block",), 200.0, Straight(3, 3, 8, 216, 56, 24), "a warpgroup decodes: flash at 512 tokens 274 us, 529 decoded ahead; v3 617 and 930"),
    (("w4a8_block",), 700.0, Straight(3, 3, 24, 216, 56, 24, ahead=16), "decoded once per wave: flash at 2048 tokens 818-841 us, 878 per tile, 924 with a ring of 32; v3 1603-1648 and 1940; pro 2242-2286, 2312-2522"),
    (("w4a8_block",), 1200.0, Straight(3, 3, 24, 216, 56, 24, ahead=32), "pro at 8192 tokens: 6603-6901 us, 6740-6880 and 7021 with rings of 16 and 64, 6976 with 16 tiles together"),
    (("w4a8_block",), INF,  Straight(3, 3, 24, 216, 56, 24, ahead=64), "flash at 8192 tokens: 2582 us, 2737 and 2816 with rings of 32 and 16; v3 5883 and 5923"),
    (("w8a8",),       4.0,  (8, 2, 2),        "flash at 8 tokens 171.2 us, 172.8 with one K block a stage"),
    (("w8a8",),       13.0, (16, 2, 2),       "flash at 64 tokens 208.7 us, 211.8 with one K block a stage, 213.4 with 32 tokens"),
    (("w8a8",),       22.5, (32, 2, 2),       "v3 at 64 tokens 349.2 us, 356.5 with one K block a stage"),
    (("w8a8",),       40.0, (64, 2, 1),       "two K blocks leave two stages; not measured apart"),
    (("w8a8",),       200.0, Straight(4, is_drawn=True), "L2 follows L1 tile by tile: v3 at 512 tokens 504 us, 523 dealt; pro 817-843, 866 by turns; flash 262-267, 270"),
    (("w8a8",),       300.0, Straight(4, is_dealt=True), "two tiles share their weights while they run side by side: pro at 2048 tokens 1766-1835 us, 1852-1886 drawn"),
    (("w8a8",),       INF,  Straight(4, span=16, is_drawn=True), "pro at 8192 tokens 6361 us, 6547 with 8 tiles together, 6441-6604 dealt; v3 5837 and 5781-5879; flash at 2048 650, 672 dealt"),
    (_FP4,            4.0,  (8, 2, 2),        "flash at 8 tokens: w4a16 132 us, 139 with one K block a stage; nvfp4 166, 172"),
    (_FP4,            13.0, (16, 2, 2),       "flash at 64 tokens: w4a16 146 us, 153 with one K block a stage, 161 with 32 tokens; nvfp4 186 and 190"),
    (_FP4,            22.5, (32, 2, 2),       "v3 at 64 tokens: w4a16 262 us, 273 with one K block a stage; nvfp4 338 and 337-338"),
    (("bf16",),       4.0,  (8, 2, 1),        "flash at 8 tokens 315 us, 349 with two K blocks a stage"),
    (("bf16",),       9.75, (16, 2, 1),       "the narrowest tile that covers a busy expert; flash at 64 tokens (12 rows) 389 us, 387 with 32 tokens"),
    (("bf16",),       22.5, (32, 2, 1),       "v3 at 64 tokens 661 us, 664 with two K blocks a stage"),
    (_BF16,           49.8, (64, 1, 1),       "two slabs of 64 tokens lack registers"),
    (_BF16,           INF,  (128, 1, 1, 4),   "256 tokens leave two stages and spill"),
)
# An FP4 layer whose exponents do not fit E4M3 multiplies in BF16 and still promotes every 128.
WIDE_RANGE: tuple[tuple[float, tuple[int, ...], str], ...] = (
    (4.0,  (8, 2, 1),  "exact path for exponents that E4M3 lacks"),
    (22.5, (32, 2, 1), "exact path for exponents that E4M3 lacks"),
    (INF,  (64, 2, 1), "exact path for exponents that E4M3 lacks"),
)
# fmt: on


def tiles(recipe: str, rows_per_expert: float, *, fits_e4m3: bool = True) -> tuple[Tile, str]:
    """(the tile of both linears, why)."""
    shape: tuple[int, ...] | Straight
    if recipe == "w4a8_block" and not fits_e4m3:
        shape, why = next((t, w) for edge, t, w in WIDE_RANGE if rows_per_expert <= edge)
    else:
        shape, why = next(
            (shape, why)
            for recipes, edge, shape, why in TILES
            if recipe in recipes and rows_per_expert <= edge
        )
    return tile_of(recipe, shape, fits_e4m3=fits_e4m3), why


def tile_of(recipe: str, shape: tuple[int, ...] | Straight, *, fits_e4m3: bool = True) -> Tile:
    """An entry of the tables as a tile, with as many stages as shared memory holds."""
    if isinstance(shape, Straight):
        return shape
    has_scales = recipe in ("w8a8", "w4a8_block")
    is_fp8 = recipe == "w8a8" or (recipe == "w4a8_block" and fits_e4m3)
    return _swapped(recipe, shape, 1 if is_fp8 else 2, 4 if has_scales else 0)


def _swapped(recipe: str, shape: tuple[int, ...], element: int, scale: int) -> Swapped:
    """The tile with as many stages as shared memory holds; bytes of an element and of a scale."""
    given = (*shape, *(1, shape[0] < 64)[len(shape) - 3 :])
    tokens, slabs, depth, span, is_stream = given
    bits = recipe_named(recipe).weights.bits_per_value
    if recipe_named(recipe).weights.block[0] > 1:
        bits = 8  # scales of 128x128 do not pass through the ring
    weights = int(64 * 128 * bits / 8) * GROUPS * slabs
    stage = depth * (weights + tokens * 128 * element + max(tokens, 32) * scale) + 16
    fixed = 2 * GROUPS * tokens * 4 + (GROUPS * tokens * 64 if tokens >= 64 else 0)
    stages = min((SHARED_BYTES - align_up(fixed, 1024)) // stage, MOST_STAGES)
    window = 0 if bits < 8 and element == 2 else WINDOW
    return Swapped(tokens, slabs, depth, stages, span, bool(is_stream), window)
