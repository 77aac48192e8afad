"""The one file that knows how Gluon's names differ between Triton 3.6 and 3.9.

Kernels are written in the words of 3.6, the Triton that was run on GPUs. What later ones renamed or
took away is here under its old name; at 3.6 these are Triton's own objects, so that machine code
there is as if this file did not exist. A kernel that needs none of them imports Gluon itself.

  here                            3.6  3.7  3.8                           3.9
  gl.thread_barrier               own  gl.barrier                         gl.barrier
  tma.async_copy_global_to_shared own  own  tma.async_load                tma.async_load
  async_copy.the same             own  own  async_copy.async_load         the same
  get_tmem_reg_layout             own  own  the descriptor's own layout   the same
  reinterpret(desc, ..)           desc._reinterpret in all                desc.reinterpret
"""

import math
from types import ModuleType
from typing import Any

import triton
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as _language
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import blackwell as _blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy as _async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as _mbarrier
from triton.experimental.gluon.language.nvidia.hopper import tma as _tma


def _with(module: ModuleType, **names: Any) -> ModuleType:
    """The module, or where it lacks one of the names a copy that has them."""
    missing = {name: what for name, what in names.items() if what is not None}
    if not missing:
        return module
    renamed = ModuleType(module.__name__, module.__doc__)  # by its name Triton knows it for its own
    vars(renamed).update({**vars(module), **missing})
    return renamed


VERSION = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])
HAS_PAIRS = VERSION >= (3, 8)  # block-scaled products of a pair of CTAs, cluster launch control

gl = _with(
    _language,
    thread_barrier=None if hasattr(_language, "thread_barrier") else _language.barrier,
)


def _copies(module: ModuleType) -> ModuleType:
    """3.9 has the old name of a copy too, to say that it is gone."""
    return _with(module, async_copy_global_to_shared=getattr(module, "async_load", None))


tma, blackwell_tma, async_copy = _copies(_tma), _copies(_blackwell.tma), _copies(_async_copy)


# mbarriers of several CTAs; 3.6 has none, and compiles nothing that asks for them.
allocate_mbarrier = getattr(_mbarrier, "allocate_mbarrier", None)


@builtin
def reinterpret(desc, dtype, shape, layout, _semantic=None):  # type: ignore[no-untyped-def]
    """Memory of a CTA, or the beginning of it, under another type, shape and layout."""
    view = getattr(desc, "reinterpret", None) or desc._reinterpret
    if VERSION == (3, 8) and isinstance(desc, _language.shared_memory_descriptor):
        times = _bits(desc.dtype, desc.shape) // _bits(dtype, shape)
        if times > 1:  # 3.8 wants views of all of it: the first of so many
            whole = view(dtype, [times, *shape], layout, _semantic=_semantic)
            return whole.index(0, _semantic=_semantic)
    return view(dtype, shape, layout, _semantic=_semantic)


def _bits(dtype: Any, shape: Any) -> int:
    """Of a tensor, whose type and shape may be compile-time values."""
    bits = getattr(dtype, "value", dtype).primitive_bitwidth
    return int(bits * math.prod(int(getattr(n, "value", n)) for n in shape))


@constexpr_function
def _reg_layout(element, shape, layout, num_warps):  # type: ignore[no-untyped-def]
    """Registers of a thread that reads tensor memory [128, N] or stores it."""
    descriptor = _blackwell.tensor_memory_descriptor_type(element, shape, layout, shape)
    return descriptor.get_reg_layout(num_warps=num_warps)


get_tmem_reg_layout = getattr(_blackwell, "get_tmem_reg_layout", _reg_layout)

__all__ = [
    "HAS_PAIRS",
    "VERSION",
    "allocate_mbarrier",
    "async_copy",
    "blackwell_tma",
    "get_tmem_reg_layout",
    "gl",
    "reinterpret",
    "tma",
]
