"""Numerics: what the tensor cores multiply, by backend and recipe. One arithmetic per recipe.

No bit of a result depends on tiles, modes or ranks, so nothing but this table decides it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.errors import NotAvailable, require
from megamoe.formats.spec import Scale, recipe_named


@dataclass(frozen=True, slots=True)
class Numerics:
    """How one backend computes one recipe.

    mma        operand type of the MMA: "bf16", "fp8", "fp4"; "float64" in the oracle
    promotion  columns of K after which a sum takes its scales and is added in FP32; 0: the MMA
               adds over all of K
    acts       how activations lie in memory: "plain" BF16; "values": BF16 that holds quantised
               values exactly; "scaled": BF16 elements, their scales apart; "codes": as the format;
               "placed": as the format, scales where the MMA copies them from
    weights    how weights reach the MMA: "bf16"; "fp8_128x128": E4M3 and its FP32 scales; "upcast":
               the same as BF16; "mxfp4" and "nvfp4": FP4, decoded on the way; "mxfp4_codes" and
               "nvfp4_codes": FP4 and its scales, as the MMA takes them
    """

    mma: str
    promotion: int
    acts: str
    weights: str
    why: str

    @property
    def is_native(self) -> bool:
        """Whether the MMA takes codes and scales of both operands."""
        return self.weights.endswith("_codes") and self.promotion == 0

    @property
    def decodes(self) -> bool:
        """Whether FP4 weights are decoded on their way to the MMA."""
        return self.weights in ("mxfp4", "nvfp4")


# fmt: off
# (backend, recipe) -> numerics. "native" is portable on a GPU with block-scaled MMAs (sm_100).
TABLE: dict[tuple[str, str], Numerics] = {
    ("hopper", "bf16"):           Numerics("bf16", 0,   "plain",  "bf16",        "BF16 operands"),
    ("hopper", "w8a8"):           Numerics("fp8",  128, "codes",  "fp8_128x128", "FP8 operands, one scale per 128 of K"),
    ("hopper", "w4a16"):          Numerics("bf16", 0,   "plain",  "mxfp4",       "FP4 times its scale is exact in BF16"),
    ("hopper", "w4a8"):           Numerics("bf16", 0,   "values", "mxfp4",       "a scale per 32 of K: BF16 holds both operands exactly and needs no promotion"),
    ("hopper", "w4a8_block"):     Numerics("fp8",  128, "codes",  "mxfp4",       "FP4 decoded to FP8 in registers, one activation scale per 128 of K"),
    ("hopper", "w4a4"):           Numerics("bf16", 0,   "values", "mxfp4",       "no FP4 tensor cores; BF16 holds both operands exactly"),
    ("hopper", "nvfp4"):          Numerics("bf16", 0,   "values", "nvfp4",       "no FP4 tensor cores; BF16 holds both operands exactly"),
    ("portable", "bf16"):         Numerics("bf16", 0,   "plain",  "bf16",        "BF16 operands"),
    ("portable", "w8a8"):         Numerics("fp8",  128, "codes",  "fp8_128x128", "FP8 operands, one scale per 128 of K"),
    ("portable", "w4a16"):        Numerics("bf16", 0,   "plain",  "mxfp4",       "FP4 times its scale is exact in BF16"),
    ("portable", "w4a8"):         Numerics("bf16", 0,   "values", "mxfp4",       "BF16 holds both operands exactly"),
    ("portable", "w4a8_block"):   Numerics("bf16", 128, "scaled", "mxfp4",       "BF16 holds both elements exactly; activation scales per 128 of K"),
    ("portable", "w4a4"):         Numerics("bf16", 0,   "values", "mxfp4",       "BF16 holds both operands exactly"),
    ("portable", "nvfp4"):        Numerics("bf16", 0,   "values", "nvfp4",       "BF16 holds both operands exactly"),
    ("portable", "nvfp4a16"):     Numerics("bf16", 0,   "plain",  "nvfp4",       "FP4 times its scale is exact in BF16; the factor multiplies sums"),
    ("blackwell", "bf16"):        Numerics("bf16", 0,   "plain",  "bf16",        "BF16 operands"),
    ("blackwell", "w8a8"):        Numerics("fp8",  128, "codes",  "fp8_128x128", "FP8 operands, one scale per 128 of K"),
    ("blackwell", "w4a16"):       Numerics("bf16", 0,   "plain",  "mxfp4",       "FP4 times its scale is exact in BF16, decoded to tensor memory"),
    ("blackwell", "w4a8"):        Numerics("fp8",  0,   "placed", "mxfp4_codes", "kind::mxf8f6f4 takes codes and scales"),
    ("blackwell", "w4a8_block"):  Numerics("fp8",  128, "codes",  "mxfp4_codes", "kind::mxf8f6f4 takes FP4 and its scales; one activation scale per 128 of K"),
    ("blackwell", "w4a4"):        Numerics("fp4",  0,   "placed", "mxfp4_codes", "kind::mxf4 takes codes and scales"),
    ("blackwell", "nvfp4"):       Numerics("fp4",  0,   "placed", "nvfp4_codes", "kind::mxf4nvf4 takes codes and scales"),
    ("native", "w4a8"):           Numerics("fp8",  0,   "codes",  "mxfp4_codes", "block-scaled MMA takes codes and scales"),
    ("native", "w4a4"):           Numerics("fp4",  0,   "codes",  "mxfp4_codes", "block-scaled MMA takes codes and scales"),
    ("native", "nvfp4"):          Numerics("fp4",  0,   "codes",  "nvfp4_codes", "block-scaled MMA takes codes and scales"),
}
WIDE_RANGE = Numerics("bf16", 128, "scaled", "mxfp4", "a weight scale that E4M3 cannot take in: BF16 elements, exact too")
UPCAST = Numerics("bf16", 128, "codes", "upcast", "no FP8 tensor cores before sm_89: E4M3 multiplied as BF16, exact")
ORACLE = Numerics("float64", 0, "codes", "values", "float64 sums of exactly quantised operands")
# fmt: on
HOPPER_RECIPES = tuple(recipe for backend, recipe in TABLE if backend == "hopper")
BLACKWELL_RECIPES = tuple(recipe for backend, recipe in TABLE if backend == "blackwell")


def not_on(backend: str, recipe: str) -> str:
    """Why a backend does not compute a recipe; "" where it does."""
    has_it = backend == "reference" or (backend, recipe) in TABLE
    return "" if has_it else f"no kernel for recipe {recipe}"


def numerics(
    backend: str, recipe: str, *, arch: str = "sm_90a", fits_e4m3: bool = True
) -> Numerics:
    """The row of a backend and recipe.

    fits_e4m3  hopper, w4a8_block: whether all weights times their scales are E4M3 values
    """
    if backend == "reference":
        return ORACLE
    if backend == "hopper" and recipe == "w4a8_block" and not fits_e4m3:
        return WIDE_RANGE
    if backend == "portable" and arch.startswith("sm_10") and ("native", recipe) in TABLE:
        return TABLE["native", recipe]
    if backend == "portable" and recipe == "w8a8" and arch in ("sm_80", "sm_86", "sm_87"):
        return UPCAST
    require(
        (backend, recipe) in TABLE,
        f"backend {backend} must have kernels for the recipe",
        got=recipe,
        fix='use backend="portable", which has all of them',
        kind=NotAvailable,
    )
    return TABLE[backend, recipe]


def decodes_to_e4m3(recipe: str, *, fits_e4m3: bool = True) -> bool:
    """Whether Hopper's kernels decode FP4 weights to E4M3; from no others to no others.

    >>> [decodes_to_e4m3(recipe) for recipe in ("w4a8_block", "w4a8", "w8a8", "nvfp4a16")]
    [True, False, False, False]
    """
    if not_on("hopper", recipe):
        return False
    how = numerics("hopper", recipe, fits_e4m3=fits_e4m3)
    return how.decodes and how.mma == "fp8"


def image_of(recipe: str, *, fits_e4m3: bool = True, can_be_placed: bool = False) -> str:
    """How Hopper's kernels hold the weights of a recipe: a row of `layout.images.BLOCK_BYTES`.

    fits_e4m3      all weights times their scales are E4M3 values
    can_be_placed  MXFP4 whose bits can stand where BF16 has them
    """
    weights = recipe_named(recipe).weights
    if weights.element.bits != 4:
        return "bf16" if weights.scale is Scale.NONE else "fp8"
    if weights.scale is Scale.E4M3:
        return "nv_image"
    if decodes_to_e4m3(recipe, fits_e4m3=fits_e4m3):
        return "e4m3_image"
    return "placed_image" if can_be_placed else "mx_image"


def narrowest_mma(recipe: str) -> str:
    """The narrowest MMA type that holds both operands of a recipe: what a floor may assume.

    >>> narrowest_mma("w4a8"), narrowest_mma("w4a16"), narrowest_mma("nvfp4")
    ('fp8', 'bf16', 'fp4')
    """
    formats = recipe_named(recipe)
    bits = max(formats.weights.element.bits, formats.acts.element.bits)
    return {16: "bf16", 8: "fp8", 4: "fp4"}[bits]
