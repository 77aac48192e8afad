"""The planner's table of numerics is the only one: the kernels' kinds agree with it."""

import pytest
import torch

from megamoe.formats.quantized import empty
from megamoe.formats.spec import recipe_named
from megamoe.kernels.blackwell import launch as blackwell
from megamoe.kernels.blackwell.formats import FORMATS
from megamoe.kernels.hopper import launch as hopper
from megamoe.kernels.hopper.weights import pack
from megamoe.kernels.hopper.weights.operands import WEIGHTS
from megamoe.kernels.portable import launch as portable
from megamoe.layout.images import BLOCK_BYTES, image_bytes
from megamoe.layout.regions import align_up
from megamoe.planner.numerics import (
    BLACKWELL_RECIPES,
    HOPPER_RECIPES,
    TABLE,
    decodes_to_e4m3,
    image_of,
    numerics,
)

MMA = {"bf16": "bf16", "e4m3": "fp8", "e2m1": "fp4"}  # of the narrower operand that an MMA takes


@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_blackwell(recipe):
    how, kind, row = numerics("blackwell", recipe), FORMATS[recipe], recipe_named(recipe)
    assert MMA[kind.X.value] == how.mma and kind.PROMOTED.value == (how.promotion > 0)
    assert kind.DECODED.value == how.decodes
    assert kind.SCALED.value == how.weights.endswith("_codes")
    assert kind.X_SCALED.value == (how.acts == "placed") == how.is_native
    bits = row.weights.element.bits, row.acts.element.bits
    assert (kind.W_BITS.value, kind.X_BITS.value) == bits
    assert kind.VEC.value == (row.weights.block[1] if bits[0] == 4 else 32)
    factor = "expert" if row.weights.has_global else "block" if how.weights[:3] == "fp8" else "none"
    assert kind.FACTOR.value == factor
    acts = blackwell.arithmetic(recipe).acts
    assert acts.STORED_AS.value == how.acts


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
def test_hopper(recipe, fits):
    how = numerics("hopper", recipe, fits_e4m3=fits)
    kinds = hopper.arithmetic(recipe, fits_e4m3=fits)
    assert kinds.is_fp8 == (how.mma == "fp8") and kinds.is_promoted == (how.promotion > 0)
    assert kinds.acts.STORED_AS.value == how.acts and not how.is_native
    assert kinds.to_e4m3 == (how.decodes and how.mma == "fp8")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("recipe", [recipe for backend, recipe in TABLE if backend == "portable"])
def test_portable(recipe, arch):
    how = numerics("portable", recipe, arch=arch)
    kinds = portable.arithmetic_of(recipe, how)
    assert kinds.weights.name == how.weights and kinds.is_native == how.is_native
    assert kinds.is_ordered == how.decodes == kinds.acts.ORDERED.value
    assert kinds.acts.STORED_AS.value == how.acts
    assert kinds.tokens.PROMOTED.value == (how.promotion > 0)
    assert kinds.has_scale == (how.acts in ("codes", "scaled"))


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_blocks_of_weights_have_the_bytes_that_the_kernels_read(kind):
    values, scales = BLOCK_BYTES[kind]
    row = WEIGHTS[kind]
    assert (values, scales) == (row.SLAB_BYTES, row.SCALE_BYTES)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("recipe", HOPPER_RECIPES)
def test_an_image_has_the_bytes_that_plans_say(recipe, fits):
    """Of L1 and of L2, whose widths are padded."""
    fmt, is_mx = recipe_named(recipe).weights, recipe_named(recipe).weights.name == "mxfp4"
    for can_be_placed in (True, False):
        kind = image_of(recipe, fits_e4m3=fits, can_be_placed=can_be_placed)
        is_placed = can_be_placed and not decodes_to_e4m3(recipe, fits_e4m3=fits)
        for shape in ((3, 2, 224, 544), (3, 544, 224)):
            plain = empty(shape, fmt, torch.device("meta"))
            to_e4m3 = decodes_to_e4m3(recipe, fits_e4m3=fits)
            assert kind == pack.kind_of(plain, to_e4m3=to_e4m3, is_placed=is_placed and is_mx)
            if fmt.element.bits != 4:
                continue
            image = pack.empty_image(kind, shape, torch.device("meta"))
            num = sum(t.nbytes for t in (image.data, image.scale, image.factor) if t is not None)
            rows, cols = (align_up(n, pack.WIDTH) for n in shape[-2:])
            matrices = 2 if len(shape) == 4 else 1
            assert num == 3 * image_bytes(kind, matrices * rows, cols, matrices)
