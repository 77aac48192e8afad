"""What the `mma_type`s of a buffer mean, and arguments that came in another release's order.

DeepGEMM and its fork for SGLang put new arguments in the middle. Their types are all different, so
a value that stands at another release's place is known by its type.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from megamoe.errors import NotAvailable, RangeError, require


class Mma(NamedTuple):
    """One `mma_type`."""

    recipe: str  # ours
    is_packed: bool  # L1's rows in even and odd runs of 16 (packed FP4 MMAs), not in runs of 8
    about: str


# fmt: off
MMA = {
    "fp8xfp4":     Mma("w4a8",  False, "MXFP8 tokens, MXFP4 weights"),
    "bf16xbf16":   Mma("bf16",  False, "BF16 throughout"),
    "mxf4xmxf4":   Mma("w4a4",  True,  "MXFP4 throughout"),
    "nvfp4xnvfp4": Mma("nvfp4", True,  "NVFP4 throughout, as SGLang's fork lays it out"),
    "nvfp4":       Mma("nvfp4", False, "NVFP4 throughout, as vLLM's DeepGEMM lays it out"),
    "fp8xfp8_sm90": Mma("w8a8", False, "FP8 in blocks of 128, FP32 scales: Hopper's kernel"),
}
# fmt: on

# Upstream's activations in our words.
ACTIVATIONS = {"swiglu": "swiglu", "swigluoai": "gpt_oss", "situ": "situ"}
# By activation_alpha and activation_beta, where a call gives them: gate * sigmoid(alpha gate) *
# (up + beta), and SiTU's alpha tanh(gate / alpha) * sigmoid(gate) * beta tanh(up / beta).
FACTORS = {
    ("swiglu", 1.702, 1.0): "gpt_oss",
    ("situ", 4.0, 25.0): "situ",
}


def activation_of(name: str, alpha: float = 1.0, beta: float = 0.0) -> str:
    """Our activation for upstream's name and factors."""
    require(
        name in ACTIVATIONS,
        f"activation must be {' or '.join(ACTIVATIONS)}",
        got=repr(name),
        fix="no other activation is built",
        kind=NotAvailable,
    )
    if (alpha, beta) == (1.0, 0.0):
        return ACTIVATIONS[name]
    require(
        (name, alpha, beta) in FACTORS,
        "activation_alpha and activation_beta must be left out, or "
        + ", ".join(f"{a:g} and {b:g} for {one}" for one, a, b in FACTORS),
        got=f"{alpha:g} and {beta:g} for {name}",
        kind=NotAvailable,
    )
    return FACTORS[name, alpha, beta]


def mma_named(mma_type: object) -> Mma:
    """The row of that name; what upstream has and we have not is refused by name."""
    require(
        mma_type not in ("fp8xfp8", "fp4xfp4"),
        f"mma_type must be one of {', '.join(MMA)}",
        got=f"{mma_type!r}: MXFP8 weights, or NVFP4 with a norm after the experts, are not built",
        kind=NotAvailable,
    )
    require(
        mma_type in MMA, f"mma_type must be one of {', '.join(MMA)}", got=repr(mma_type),
        kind=RangeError,
    )  # fmt: skip
    return MMA[str(mma_type)]


def refuse_old_switches() -> None:
    """Environment variables of older forks that changed layouts; upstream refuses them too."""
    for name in ("DG_USE_FP4_ACTS", "DG_USE_MXF4_KIND"):
        require(
            os.environ.get(name, "0") in ("", "0"),
            f"{name} is not read: FP4 tokens are an mma_type",
            got=f"{name}={os.environ.get(name)}",
            fix='give mma_type="mxf4xmxf4" to get_symm_buffer_for_mega_moe and to '
            "transform_weights_for_mega_moe",
            kind=RangeError,
        )


Kind = tuple[str, Callable[[Any], bool], Any]  # name, whether a value is one, default


def sorted_out(values: tuple[Any, ...], kinds: tuple[Kind, ...]) -> dict[str, Any]:
    """Every value under the first kind that it is and that has none yet; None counts as absent.

    >>> sorted_out((True, "swigluoai", "fp8xfp4", "swiglu"), BUFFER)["activation"]
    'swigluoai'
    """
    arguments: dict[str, Any] = {}
    for value in values:
        if value is None:
            continue
        names = [name for name, is_one, _ in kinds if is_one(value)]
        require(bool(names), "an argument must be one of " + ", ".join(k[0] for k in kinds),
                got=repr(value)[:80], kind=RangeError)  # fmt: skip
        default = {name: default for name, _, default in kinds}
        free = [n for n in names if n not in arguments or arguments[n] == default[n]]
        require(
            bool(free) or value == default[names[0]],
            f"{names[0]} must be given once",
            got=repr(value)[:80],
            kind=RangeError,
        )
        if free:
            arguments[free[0]] = value
    return {name: arguments.get(name, default) for name, _, default in kinds}


def _is_int(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


def _is_weights(v: Any) -> bool:
    pair = isinstance(v, (tuple, list)) and all(isinstance(t, Tensor) for t in v)
    return pair or (isinstance(v, Tensor) and v.ndim > 1)


def _is_mma(v: Any) -> bool:
    return isinstance(v, str) and any(part in v for part in ("fp4", "fp8", "bf16", "mxf4"))


def _is_recipe(v: Any) -> bool:
    return isinstance(v, (tuple, list)) and all(_is_int(t) for t in v)


# What follows the sizes of a buffer: (shared experts, dispatch, MMA, activation) in SGLang's fork
# 0.2.5, (dispatch, MMA, activation) in DeepGEMM of June 2026, (dispatch, activation) before it.
BUFFER: tuple[Kind, ...] = (
    ("num_shared_experts", _is_int, 0),
    ("use_fp8_dispatch", lambda v: isinstance(v, bool), None),
    ("mma_type", _is_mma, "fp8xfp4"),
    ("activation", lambda v: isinstance(v, str) and not _is_mma(v), "swiglu"),
)
# What follows the buffer of a call: shared weights come first in the fork, and are absent before.
CALL: tuple[Kind, ...] = (
    ("shared_l1_weights", _is_weights, None),
    ("shared_l2_weights", _is_weights, None),
    ("stats", lambda v: isinstance(v, Tensor), None),
    ("recipe", _is_recipe, None),
    ("activation", lambda v: isinstance(v, str), "swiglu"),
    ("fast_math", lambda v: isinstance(v, bool), True),
    ("clamp", lambda v: isinstance(v, (int, float)) and not isinstance(v, bool), None),
)


def call_arguments(values: tuple[Any, ...], fast_math: Any) -> dict[str, Any]:
    """The arguments of a call by name.

    values     what stands between the buffer and `fast_math`, in any release's order
    fast_math  what stands at its own place, which is no other argument in any release
    """
    require(
        fast_math is None or isinstance(fast_math, int), "fast_math must be True or False",
        got=repr(fast_math)[:80], kind=RangeError,
    )  # fmt: skip
    for value in values:
        require(
            not _is_int(value) or value not in (0, 1),
            "a clamp must be a float, and fast_math True or False",
            got=f"the integer {value}, which may be either",
            fix=f"give {float(value)} or {bool(value)}" if _is_int(value) else "",
            kind=RangeError,
        )
    own = None if fast_math is None else bool(fast_math)
    return sorted_out((*values, own), CALL)


def check_fp8_dispatch(value: Any, mma_type: str) -> None:
    """Refuse an old flag that says other than `mma_type`; warn of one that agrees."""
    if value is None:
        return
    require(
        value == mma_type.startswith("fp8"),
        f"use_fp8_dispatch must agree with mma_type {mma_type}",
        got=value,
        fix="leave it out; mma_type says it all",
        kind=RangeError,
    )
    warnings.warn("use_fp8_dispatch is old: give mma_type", DeprecationWarning, stacklevel=3)
