"""Every quantiser on CUDA stores and returns the bits it does on the CPU."""

from __future__ import annotations

import pytest
import torch

import megamoe as mm
from megamoe.formats import elements
from megamoe.formats.quantize import dequantize, weight_global_scale
from megamoe.formats.spec import E2M1, E4M3

from . import oracle
from .support import (
    FIXED_MAXIMA,
    GLOBAL_SCALES,
    NAMES,
    alone,
    around_the_grid,
    assert_same_bits,
    beside,
    bits,
    edge_amaxes,
    finite_bf16,
    stored_codes,
)

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BYTES = torch.arange(256, dtype=torch.uint8)


def assert_device_agrees(x: torch.Tensor, name: str, g: torch.Tensor | float | None = None) -> None:
    """Codes, scales, FP32 and float64 values of `x` are the same on both devices."""
    want = mm.quantize(x, name, global_scale=g)
    there = mm.quantize(x.to(DEVICE), name, global_scale=g)
    assert {t.device.type for t in there.tensors().values()} == {DEVICE}
    got = there.to("cpu")
    x = x.float()
    assert_same_bits(got.scale, want.scale, want.scale, f"{name} scale")
    assert_same_bits(stored_codes(got), stored_codes(want), x, f"{name} element")
    for dtype in (torch.float32, torch.float64):
        values = dequantize(there, dtype)
        assert values.device.type == DEVICE
        assert_same_bits(values.cpu(), dequantize(want, dtype), x, f"{name} value in {dtype}")


@pytest.mark.parametrize("name", NAMES)
def test_every_bf16_value_alone_in_its_block_is_the_same_on_cuda(name):
    values = finite_bf16()
    if name == "fp8_128x128":  # each of these is a loop turn of its own
        values = values[::37]
    assert_device_agrees(alone(values, name), name)


@pytest.mark.parametrize("maximum", FIXED_MAXIMA)
@pytest.mark.parametrize("name", NAMES)
def test_every_bf16_value_beside_a_fixed_maximum_is_the_same_on_cuda(name, maximum):
    assert_device_agrees(beside(finite_bf16(), maximum, name), name)


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_nvfp4_under_a_global_scale_is_the_same_on_cuda(g):
    assert_device_agrees(alone(finite_bf16()[::3], "nvfp4"), "nvfp4", g)
    assert_device_agrees(beside(finite_bf16(), 448.0, "nvfp4"), "nvfp4", g)


@pytest.mark.parametrize("name", NAMES)
def test_edges_are_the_same_on_cuda(name):
    amax = edge_amaxes() if name != "fp8_128x128" else edge_amaxes()[::5]
    parts = torch.tensor([1.0, -0.75, 0.0625, -(2.0**-10), 2.0**-18, -(2.0**-30), 0.1, -0.4])
    x = torch.zeros(len(amax), 32)
    x[:, :8] = amax[:, None] * parts
    assert_device_agrees(x[:, None, :] if name == "fp8_128x128" else x, name)
    specials = torch.zeros(6, 1, 32)
    specials[1] = -0.0
    specials[2:5, 0, 3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    specials[5, 0, :2] = torch.tensor([torch.finfo(torch.float32).max, 2.0**-149])
    assert_device_agrees(specials, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 96), (2, 129, 288), (257, 2880)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_random_tensors_are_the_same_on_cuda(name, shape, dtype):
    rng = torch.Generator().manual_seed(0)
    factor = torch.exp2(torch.randint(-12, 9, (*shape[:-1], 1), generator=rng).float())
    x = (torch.randn(shape, generator=rng) * factor).to(dtype)
    g = torch.rand(shape[0], generator=rng) + 1e-3 if name == "nvfp4" else None
    assert_device_agrees(x, name, g)


def test_a_million_random_divisions_are_the_same_on_cuda():
    """One block per row of 32: a million different scales and quotients."""
    x = torch.randn(1 << 20, 32, generator=torch.Generator().manual_seed(1))
    q, there = mm.quantize(x, "fp8_1x128"), mm.quantize(x.to(DEVICE), "fp8_1x128").to("cpu")
    assert torch.equal(bits(there.scale), bits(q.scale))
    assert torch.equal(there.data.view(torch.uint8), q.data.view(torch.uint8))


def test_bf16_is_the_same_on_cuda():
    x = torch.cat((finite_bf16(), edge_amaxes()[:32])).reshape(-1, 32) * 1.001
    got, want = mm.quantize(x.to(DEVICE), "bf16").to("cpu"), mm.quantize(x, "bf16")
    assert_same_bits(got.data, want.data, x, "bf16 value")


def test_weight_global_scales_are_the_same_on_cuda():
    w = torch.randn(5, 96, 64, generator=torch.Generator().manual_seed(2))
    w[1], w[2], w[3, 0, 0], w[4] = 0.0, 1e-43, torch.nan, torch.inf
    got, want = weight_global_scale(w.to(DEVICE)).cpu(), weight_global_scale(w)
    assert_same_bits(got, want, want, "global scale")


def test_element_codes_are_the_same_on_cuda():
    there = BYTES.to(DEVICE)
    for decode in (elements.e8m0_to_float, elements.packed_e2m1_to_float):
        got, want = decode(there).cpu(), decode(BYTES)
        assert_same_bits(got, want, want, decode.__name__)
    for kind, encode in (
        (oracle.E4M3, elements.e4m3_from_float),
        (oracle.E2M1, elements.e2m1_from_float),
    ):
        x = around_the_grid(kind)
        assert_same_bits(encode(x.to(DEVICE)).cpu(), encode(x), x, encode.__name__)
    for element in (E4M3, E2M1):
        amax = edge_amaxes()
        got, want = (elements.e8m0_from_amax(t, element).cpu() for t in (amax.to(DEVICE), amax))
        assert_same_bits(got, want, amax, "E8M0 scale")
