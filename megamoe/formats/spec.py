"""Number formats and recipes as data. Standard library only; `quantize.py` does the maths.

A format is a row of FORMATS: which element, how many of them share a scale, what the scale is.
A recipe is a row of RECIPES: which format the weights have and which the activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megamoe.errors import one_of
from megamoe.problem import RECIPES as RECIPE_NAMES


@dataclass(frozen=True, slots=True)
class Element:
    """A floating-point element without infinities (or BF16, stored as it is)."""

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float  # largest finite value; larger magnitudes saturate to it
    max_exponent: int  # max = 1.xxx * 2**max_exponent

    @property
    def max_mantissa(self) -> int:
        """The 23 mantissa bits of `max` as FP32: an amax above them needs the next scale."""
        return int((self.max / 2.0**self.max_exponent - 1.0) * 2**23)


class Scale(Enum):
    """What a block's scale is stored as."""

    NONE = "none"  # the element needs none
    E8M0 = "e8m0"  # one byte: 2**(code - 127), 255 is NaN
    E4M3 = "e4m3"  # one FP8 byte, times an FP32 global scale
    FP32 = "fp32"


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix is stored: elements, and the block of (rows, columns) that shares one scale."""

    name: str
    element: Element
    block: tuple[int, int]
    scale: Scale
    width_multiple: int  # the last dimension must be a multiple; a last block may be short
    about: str

    @property
    def has_global(self) -> bool:
        """Whether an FP32 factor stands beside the block scales."""
        return self.scale is Scale.E4M3

    @property
    def bits_per_value(self) -> float:
        """Storage per value, scales included."""
        scale_bits = {Scale.NONE: 0, Scale.E8M0: 8, Scale.E4M3: 8, Scale.FP32: 32}[self.scale]
        return self.element.bits + scale_bits / (self.block[0] * self.block[1])


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row of the numerics contract."""

    name: str
    weights: Format
    acts: Format  # tokens, and the activation's output between the two linears
    tolerance: float  # relative Frobenius error of a kernel against the reference
    quantisation_error: tuple[float, float]  # plausible range, see RECIPES
    about: str


E4M3 = Element("e4m3", 8, 4, 3, 7, 448.0, 8)
E2M1 = Element("e2m1", 4, 2, 1, 1, 6.0, 2)
BFLOAT16 = Element("bf16", 16, 8, 7, 127, 3.3895313892515355e38, 127)

# fmt: off
BF16        = Format("bf16",        BFLOAT16, (1, 1),     Scale.NONE, 32, "brain float, no scale")
MXFP8       = Format("mxfp8",       E4M3,     (1, 32),    Scale.E8M0, 32, "OCP microscaling, 8 bits")
MXFP4       = Format("mxfp4",       E2M1,     (1, 32),    Scale.E8M0, 32, "OCP microscaling, 4 bits, two a byte, even column low")
NVFP4       = Format("nvfp4",       E2M1,     (1, 16),    Scale.E4M3, 16, "E2M1 packed as mxfp4; E4M3 scales times an FP32 global scale")
FP8_1X128   = Format("fp8_1x128",   E4M3,     (1, 128),   Scale.FP32, 32, "activations of DeepSeek-V3")
FP8_128X128 = Format("fp8_128x128", E4M3,     (128, 128), Scale.FP32, 32, "weights of DeepSeek-V3")
FP8_COMBINE = Format("fp8_combine", E4M3,     (1, 128),   Scale.E8M0, 32, "rows on their way to combine")

FORMATS: dict[str, Format] = {f.name: f for f in (
    BF16, MXFP8, MXFP4, NVFP4, FP8_1X128, FP8_128X128, FP8_COMBINE,
)}

# quantisation_error is the range of relative error against the BF16 layer that is plausible for
# Gaussian weights and tokens; `megamoe run` holds its result to it.
RECIPES: dict[str, Recipe] = {r.name: r for r in (
    Recipe("bf16",       BF16,        BF16,      3e-3,   (0.0, 1e-3),   "no quantisation"),
    Recipe("w8a8",       FP8_128X128, FP8_1X128, 8e-3,   (0.01, 0.08),  "DeepSeek-V3"),
    Recipe("w4a16",      MXFP4,       BF16,      3e-3,   (0.05, 0.30),  "4-bit weights, exact on any GPU"),
    Recipe("w4a8",       MXFP4,       MXFP8,     8e-3,   (0.05, 0.30),  "DeepSeek-V4; native on Blackwell"),
    Recipe("w4a8_block", MXFP4,       FP8_1X128, 8e-3,   (0.05, 0.30),  "Hopper's fast path"),
    Recipe("w4a4",       MXFP4,       MXFP4,     1.5e-2, (0.05, 0.45),  "4-bit throughout"),
    Recipe("nvfp4",      NVFP4,       NVFP4,     1.5e-2, (0.05, 0.45),  "4-bit with finer scales"),
    Recipe("nvfp4a16",   NVFP4,       BF16,      3e-3,   (0.05, 0.30),  "NVFP4 weights, BF16 tokens; no kernel on Hopper"),
)}
# fmt: on

# (recipe, machine): another recipe that has the same weights, bit for bit, and tokens that the
# machine multiplies faster. Hopper has no MMA with MXFP8's scales, so w4a8 is BF16 math there.
FASTER = {("w4a8", "sm_90"): "w4a8_block"}

FP8_COMBINE_FACTOR = 2.0  # on the tolerance: rows are rounded to E4M3 once more, and codes flip
INTERPRETER_FACTOR = 2.0  # tolerances in Triton's interpreter, which truncates FP32 -> BF16

assert tuple(RECIPES) == RECIPE_NAMES


def format_named(name: str) -> Format:
    """The format of that name, or an error that lists the names."""
    one_of(name, tuple(FORMATS), "format")
    return FORMATS[name]


def recipe_on(recipe: str, arch: str) -> str:
    """The recipe to take by default on a machine, for a checkpoint that is made for `recipe`.

    >>> recipe_on("w4a8", "sm_90a"), recipe_on("w4a8", "sm_100a"), recipe_on("w8a8", "sm_90a")
    ('w4a8_block', 'w4a8', 'w8a8')
    """
    return FASTER.get((recipe, arch.rstrip("af")), recipe)


def recipe_named(name: str) -> Recipe:
    """The recipe of that name, or an error that lists the names."""
    one_of(name, tuple(RECIPES), "recipe")
    return RECIPES[name]
