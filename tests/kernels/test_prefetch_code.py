"""A kernel finds its own code: the loader is asked for its address."""

import logging
from struct import unpack_from

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.compiler_hooks import ours
from megamoe.kernels.gluon.mega import prefetch_code
from megamoe.kernels.gluon.mega.prefetch_code import code_address
from megamoe.kernels.gluon.mega.prefetch_code import prefetch_code as prefetch
from tests.kernels.compiling import FUNCTION, Stand, addresses, code_of, compile_kernel
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


@ours
@gluon.jit
def own_kernel(out, READ: gl.constexpr):
    prefetch()
    at = code_address()
    gl.store(out, at)
    if READ:
        gl.store(out + 1, gl.load(at.to(gl.pointer_type(gl.int64))))
        gl.store(out + 2, gl.load((at + 256).to(gl.pointer_type(gl.int64))))


@gluon.jit
def plain_kernel(out):
    gl.store(out, 1)


def test_the_loader_is_asked_for_the_address_of_the_code():
    kernel = compile_kernel(own_kernel, (Stand(torch.int64), False), 90, num_warps=4)
    assert list(addresses(kernel)) == [(FUNCTION, 0)]


def test_a_cubin_that_asks_for_nothing_stays_as_it_is():
    kernel = compile_kernel(plain_kernel, (Stand(torch.int32),), 90, num_warps=4)
    assert not list(addresses(kernel))
    assert prefetch_code.located(kernel.asm["cubin"]) is kernel.asm["cubin"]


@pytest.mark.parametrize(
    ("loads", "want"),
    [
        ({b"changed": True}, b"changed"),
        ({b"changed": None}, b"changed"),  # nobody to ask
        ({b"changed": False, b"plain": True}, b"plain"),
        ({b"changed": False, b"plain": False}, b"changed"),  # made for another GPU
    ],
)
def test_what_a_driver_refuses_stays_as_the_compiler_made_it(loads, want, monkeypatch):
    monkeypatch.setattr(prefetch_code, "_exchanged", lambda cubin: b"changed")
    monkeypatch.setattr(prefetch_code, "_loads", loads.__getitem__)
    assert prefetch_code.located(b"plain") == want


def test_a_refusal_is_logged_once(monkeypatch, caplog):
    """Several kernels are compiled; a cubin that no driver here would load is no refusal."""
    monkeypatch.setattr(prefetch_code, "_exchanged", lambda cubin: b"changed")
    prefetch_code._log_refusal.cache_clear()
    with caplog.at_level(logging.WARNING, "megamoe"):
        for refused in (None, False):
            loads = {b"changed": refused, b"plain": refused}
            monkeypatch.setattr(prefetch_code, "_loads", loads.__getitem__)
            prefetch_code.located(b"plain")
        assert not caplog.records
        monkeypatch.setattr(prefetch_code, "_loads", {b"changed": False, b"plain": True}.get)
        for _ in range(3):
            assert prefetch_code.located(b"plain") == b"plain"
    (record,) = caplog.records
    assert record.name == "megamoe" and "do not prefetch it" in record.getMessage()
    prefetch_code._log_refusal.cache_clear()


def test_without_a_driver_nobody_knows_what_loads(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(prefetch_code.ctypes, "CDLL", missing)
    assert prefetch_code._loads(b"") is None


@pytest.mark.gpu
def test_the_driver_says_what_it_loads():
    kernel = own_kernel[(8,)](torch.zeros(3, dtype=torch.int64, device="cuda"), False, num_warps=4)
    cubin = kernel.asm["cubin"]
    assert prefetch_code._loads(cubin) is True
    assert prefetch_code._loads(cubin[:64] + bytes(64)) is False


@pytest.mark.gpu
def test_what_lies_at_the_address_are_the_instructions():
    out = torch.zeros(3, dtype=torch.int64, device="cuda")
    kernel = own_kernel[(8,)](out, True, num_warps=4)
    address, first, later = out.tolist()
    instructions = code_of(kernel)
    assert address % 128 == 0
    assert (first, later) == tuple(unpack_from("<q", instructions, at)[0] for at in (0, 256))
