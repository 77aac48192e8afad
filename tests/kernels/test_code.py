"""A kernel finds its own code: the loader is asked for its address."""

from struct import unpack_from

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.hopper import code
from megamoe.kernels.hopper.code import code_address, fetch_code
from tests.kernels.compiling import Stand, compile_kernel
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


@gluon.jit
def own_kernel(out, READ: gl.constexpr):
    fetch_code()
    at = code_address()
    gl.store(out, at)
    if READ:
        gl.store(out + 1, gl.load(at.to(gl.pointer_type(gl.int64))))
        gl.store(out + 2, gl.load((at + 256).to(gl.pointer_type(gl.int64))))


@gluon.jit
def plain_kernel(out):
    gl.store(out, 1)


def sections(cubin):
    """(name, offset, bytes) of each."""
    (at,), (size, num, names) = unpack_from("<Q", cubin, 40), unpack_from("<3H", cubin, 58)
    found = [unpack_from("<2I4Q", cubin, at + size * i) for i in range(num)]
    for name, _, _, _, offset, length in found:
        start = found[names][4] + name
        yield cubin[start : cubin.index(0, start)].decode(), offset, length


def text(cubin):
    """The kernel's instructions."""
    offset, length = next(s[1:] for s in sections(cubin) if s[0].startswith(".text."))
    return cubin[offset : offset + length]


def addresses(cubin):
    """(kind of symbol, what is added) of the addresses that code loads."""
    by_name = {name: (offset, length) for name, offset, length in sections(cubin)}
    symbols = by_name[".symtab"][0]
    offset, length = by_name.get(".rela.nv.constant4", (0, 0))
    for entry in range(offset, offset + length, 24):
        symbol, added = unpack_from("<Iq", cubin, entry + 12)
        yield cubin[symbols + 24 * symbol + 4] & 15, added


def test_the_loader_is_asked_for_the_address_of_the_code():
    kernel = compile_kernel(own_kernel, (Stand(torch.int64), False), 90, num_warps=4)
    function = 2
    assert list(addresses(kernel.asm["cubin"])) == [(function, 0)]


def test_a_cubin_that_asks_for_nothing_stays_as_it_is():
    kernel = compile_kernel(plain_kernel, (Stand(torch.int32),), 90, num_warps=4)
    cubin = kernel.asm["cubin"]
    assert not list(addresses(cubin)) and code.located(cubin) == cubin


@pytest.mark.gpu
def test_what_lies_at_the_address_are_the_instructions():
    out = torch.zeros(3, dtype=torch.int64, device="cuda")
    kernel = own_kernel[(8,)](out, True, num_warps=4)
    address, first, later = out.tolist()
    instructions = text(kernel.asm["cubin"])
    assert address % 128 == 0
    assert (first, later) == tuple(unpack_from("<q", instructions, at)[0] for at in (0, 256))
