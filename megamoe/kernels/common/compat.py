"""The one file that knows what Triton's interpreter and versions lack."""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import current_target
from triton.runtime import jit
from triton.runtime.jit import constexpr_function

# The interpreter keeps BF16 as raw 16-bit words and would multiply those: go through FP32 there.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def _hash_callees_first(finder: Any) -> None:
    """Make keys of our kernels in Triton's disk cache the same in every process.

    Triton merges the constants of a called function into its caller's key before it has hashed that
    function: what the key has depends on which kernels were hashed before, so a server would not
    find what `megamoe compile` made. Keys of other kernels are as they were.
    """
    merge = getattr(finder, "_update_hash", None)
    if merge is None:
        return

    def hash_and_merge(self: Any, function: Any) -> None:
        if getattr(function, "__module__", "").startswith("megamoe."):
            function.cache_key  # noqa: B018  hashes it
        merge(self, function)

    finder._update_hash = hash_and_merge


_hash_callees_first(jit.DependenciesFinder)


@constexpr_function
def HAS_FP8():
    """Whether the GPU converts to E4M3; false where kernels are compiled without one."""
    target = current_target()
    return not INTERPRETED.value and target is not None and target.arch >= 89


@constexpr_function
def HAS_PTX():
    """Whether kernels may hold PTX."""
    target = current_target()
    return not INTERPRETED.value and target is not None and target.backend == "cuda"


@constexpr_function
def HAS_PDL():
    """Whether a launch may start while the one before it ends."""
    target = current_target()
    is_cuda = not INTERPRETED.value and target is not None and target.backend == "cuda"
    return is_cuda and target.arch >= 90


@constexpr_function
def HAS_FP32_REDUX():
    """Whether a warp's reduction of FP32 becomes one instruction, which Triton 3.6 makes for
    sm_100a, and for sm_103a dies of (LLVM cannot select it)."""
    target = current_target()
    return not INTERPRETED.value and target is not None and target.arch >= 100


@triton.jit
def after_previous():
    """First line of a kernel that may be launched with `overlap`: nothing is read before it.

    The next launch may place its programs from here on; they wait here until this one has ended
    and its writes are seen. Without `overlap` it does nothing.
    """
    if HAS_PDL():
        gdc_launch_dependents()
        gdc_wait()


def overlap(is_wanted: bool) -> dict[str, bool]:
    """Launch options: programmatic dependent launch (E009), where it is wanted."""
    return {"launch_pdl": True} if is_wanted else {}


@triton.jit
def to_fp32(x):
    """FP32 of any float; the interpreter's own cast makes zeros of BF16's subnormals."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def bf16_mul(a, b):
    """BF16 product; the callers' products are exact, so no rounding is left open."""
    if INTERPRETED:
        return to_bf16(to_fp32(a) * to_fp32(b))
    else:
        return a * b


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with FP32 sums."""
    if INTERPRETED:
        return tl.dot(to_fp32(a), to_fp32(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def to_bf16(x):
    """FP32 to the nearest BF16, ties to even; the interpreter's own cast truncates."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        rounded = tl.where(x != x, 0x7FC0, rounded).to(tl.int16)
        return rounded.to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def div_rn(x, y):
    """x / y correctly rounded, y > 0.

    A product with the rounded reciprocal and one exact correction give the IEEE quotient
    (Markstein) for a third of a division, as long as nothing on the way is subnormal.
    """
    if INTERPRETED:
        return tl.div_rn(x, y)
    else:
        wide = tl.broadcast_to(y, x.shape)
        flat = tl.reshape(y, (y.numel,))
        is_plain = False
        if HAS_FP32_REDUX():  # by their bits, which have the same order: NaN is above
            bits = flat.to(tl.int32, bitcast=True)
            is_plain = (tl.min(bits) > 0x1E3CE508) & (tl.max(bits) < 0x60AD78EC)
        else:
            is_plain = (tl.min(flat) > 1e-20) & (tl.max(flat) < 1e20)
        if is_plain:
            reciprocal = tl.broadcast_to(tl.div_rn(tl.full(y.shape, 1.0, tl.float32), y), x.shape)
            first = x * reciprocal
            result = tl.fma(tl.fma(first, -wide, x), reciprocal, first)
            result = tl.where(first == 0.0, first, result)  # the correction would lose -0
        else:
            result = tl.div_rn(x, wide)
        return result
