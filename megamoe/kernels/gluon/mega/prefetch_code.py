"""A fused launch prefetches its own code into the L2 cache as it begins, and keeps it there.

After other kernels none of it is in a cache, and every role waits for instructions from memory,
which queue after the weights. A kernel's address is no value in PTX: its symbol is 0. So code asks
for the address of a variable, and a stage of the compiler (`located`) has the loader write that of
the kernel there. Without it, and where the driver does not load what the stage wrote (which is
logged once), what follows the variable is fetched, and nothing is gained.
"""

import ctypes
import functools
import logging
from struct import pack_into, unpack_from

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.compiler_hooks import change

LOG = logging.getLogger("megamoe")
LINE = gl.constexpr(128)
PARTS = gl.constexpr(6)  # CTAs that fetch 128 lines each: 96 KB; decode has 75 to 98
LONG_PARTS = gl.constexpr(8)  # 128 KB: over several ranks
_FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_NAME = "megamoe_begin"  # of the variable
_BEGIN = gl.constexpr(f"{{ .global .align 8 .b64 {_NAME}; mov.u64 $0, {_NAME}; }}")
# evict_last: 110 MB of weights pass through L2 as usual before the first epilogue.
_FETCH = gl.constexpr("prefetch.global.L2::evict_last [$1]; mov.b32 $0, 0;")


@gluon.jit
def code_address():
    """Of the kernel's first instruction."""
    return gl.inline_asm_elementwise(_BEGIN, "=l", [], dtype=gl.int64, is_pure=True, pack=1)


@gluon.jit
def prefetch_code(IS_LONG: gl.constexpr = False):
    """The launch's first warpgroup: bring the kernel's code into the L2 cache.

    Shorter code is fetched with what follows it: a branch here would cost code everywhere.
    """
    NUM: gl.constexpr = LONG_PARTS if IS_LONG else PARTS
    at = (gl.program_id(0) % NUM * 128 + gl.arange(0, 128, _FLAT)) * LINE
    gl.inline_asm_elementwise(
        _FETCH, "=r,l", [code_address() + at], dtype=gl.int32, is_pure=False, pack=1
    )


def located(cubin: bytes) -> bytes:
    """The cubin, in which the variable stands for its kernel if the driver here loads it so."""
    changed = _exchanged(cubin)
    is_refused = changed != cubin and _loads(changed) is False and _loads(cubin) is True
    if is_refused:
        _log_refusal()
    return cubin if is_refused else changed


@functools.cache
def _log_refusal() -> None:
    """Once in a process: results are the same, and launches are slower."""
    LOG.warning(
        "this driver does not load kernels that hold the address of their own code: fused launches "
        "do not prefetch it and begin later"
    )


def _loads(cubin: bytes) -> bool | None:
    """Whether the driver takes it; None where there is none, or no context of this thread."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    context, module = ctypes.c_void_p(), ctypes.c_void_p()
    if cuda.cuCtxGetCurrent(ctypes.byref(context)) != 0 or not context:
        return None
    if cuda.cuModuleLoadData(ctypes.byref(module), cubin) != 0:
        return False
    cuda.cuModuleUnload(module)
    return True


def _exchanged(cubin: bytes) -> bytes:
    """The cubin, in which relocations name the kernel where they named the variable.

    Addresses that code loads lie in a bank of constants, and relocations (24 bytes: place, type,
    symbol, what is added) say of which symbols they are. Other kernels' cubins stay as they are.
    """
    if _NAME.encode() not in cubin:
        return cubin
    data = bytearray(cubin)
    (at,), (size, num, names) = unpack_from("<Q", data, 40), unpack_from("<3H", data, 58)
    sections = [unpack_from("<2I4Q2I", data, at + size * i) for i in range(num)]

    def text(start: int) -> bytes:
        return bytes(data[start : data.index(0, start)])

    def entries(section: tuple[int, ...]) -> range:
        return range(section[4], section[4] + section[5], 24)

    table = next(s for s in sections if s[1] == 2)  # of symbols: name, type, flags, ..
    symbols = [unpack_from("<I2B", data, i) for i in entries(table)]
    kernels = [i for i, s in enumerate(symbols) if s[1] & 15 == 2 and s[2] & 16]
    for section in sections:
        if text(sections[names][4] + section[0]) != b".rela.nv.constant4" or len(kernels) != 1:
            continue
        for entry in entries(section):
            (symbol,) = unpack_from("<I", data, entry + 12)
            if _NAME.encode() in text(sections[table[6]][4] + symbols[symbol][0]):
                pack_into("<I", data, entry + 12, kernels[0])
    return bytes(data)


change("cubin", located, "megamoe.code 2")
