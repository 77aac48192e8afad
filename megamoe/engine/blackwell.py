"""The Blackwell backend: weights with placed scales, and Blackwell's launchers.

Emulated and compiled, not yet run on the hardware: `auto` takes it only where a machine has proven
it. Weights stay as checkpoints have them, only scales are placed (`kernels.blackwell.weights`).
"""

from __future__ import annotations

from megamoe.engine.derived import known
from megamoe.engine.gluon import Gluon
from megamoe.engine.interface import Prepared
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.formats.quantized import Quantized
from megamoe.kernels.blackwell import launch
from megamoe.kernels.blackwell.launch import DEST_UNIT, Arithmetic
from megamoe.kernels.blackwell.mega import launch as mega
from megamoe.kernels.blackwell.weights import place, place_into
from megamoe.kernels.gluon.dispatch import Tokens
from megamoe.kernels.hopper.weights.pack import fits_bf16
from megamoe.planner.tables.blackwell import ACTIVATIONS


class Blackwell(Gluon):
    """Blackwell's kernels."""

    name = "blackwell"
    launch, mega, dest_unit, activations = launch, mega, DEST_UNIT, ACTIVATIONS

    def prepare(self, weights: ExpertWeights, shared: ExpertWeights | None = None) -> Prepared:
        assert shared is None, "shared experts have launches of their own"
        reason = why_not(weights)
        require(
            not reason,
            "the blackwell backend needs E8M0 scales of 2**-126 or more where w4a16 decodes to "
            "BF16",
            got=reason,
            fix='use backend="portable", which holds them exactly',
            kind=NotAvailable,
        )
        w13, w2 = (
            known(w, "placed for sm_100", place, place_into) for w in (weights.w13, weights.w2)
        )
        return Prepared(w13, w2, launch.arithmetic(weights.recipe))

    def ready(self, x: Quantized, arithmetic: Arithmetic) -> Tokens:
        scale, g = (None if t is None else t.contiguous() for t in (x.scale, x.global_scale))
        return Tokens(x.data, scale, g, is_ready=True, hidden=x.shape[1])


def why_not(weights: ExpertWeights) -> str:
    """Why no exact path holds these weights; "" where one does."""
    if weights.recipe != "w4a16" or weights.device.type == "meta":
        return ""
    both = weights.w13, weights.w2
    return "" if all(known(w, "fits_bf16", fits_bf16) for w in both) else "a scale of 2**-127"


BLACKWELL = Blackwell()
