"""Whole tensors: shapes, strides, input types, chunks, and blocks that depend on nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

import megamoe as mm
from megamoe.errors import ShapeError
from megamoe.formats import quantize as implementation
from megamoe.formats.quantize import quantize_into

from . import oracle
from .support import (
    MX,
    NAMES,
    alone,
    assert_follows_the_rule,
    assert_holds_the_rule,
    assert_same_bits,
    beside,
    bits,
    edge_amaxes,
    finite_bf16,
    from_bits,
)

SHAPES = [(1, 32), (7, 96), (3, 5, 64), (2, 3, 2, 32), (130, 160), (2, 129, 288), (257, 2880)]


def random_tensor(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Gaussian values under a factor per row that spans forty binades."""
    rng = torch.Generator().manual_seed(seed)
    factor = torch.exp2(torch.randint(-20, 21, (*shape[:-1], 1), generator=rng).float())
    return torch.randn(shape, generator=rng) * factor


def assert_equal(a: mm.Quantized, b: mm.Quantized, what: str = "") -> None:
    """The same stored bits."""
    assert torch.equal(bits(a.data), bits(b.data)), what
    assert torch.equal(bits(a.scale), bits(b.scale)), what


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_random_tensors_match_the_rule_block_by_block(name, shape):
    x = random_tensor(shape)
    rows, cols = oracle.RULES[name].block
    every = max(1, x.numel() // (rows * cols) // (200 if rows == 1 else 5))
    q = assert_follows_the_rule(x, name, every=every)
    lead = shape[:-1] if rows == 1 else (*shape[:-2], -(-shape[-2] // rows))
    assert q.scale.shape == (*lead, -(-shape[-1] // cols))
    assert mm.dequantize(q).shape == q.shape == shape
    assert mm.dequantize(q).dtype == torch.float32


@pytest.mark.parametrize("name", [n for n in NAMES if n != "fp8_128x128"])
def test_a_single_row_without_leading_dimensions_matches_the_rule(name):
    assert_follows_the_rule(random_tensor((96,)), name)


@pytest.mark.parametrize("width", [16, 48, 80])
def test_nvfp4_takes_widths_that_are_odd_multiples_of_16(width):
    assert_follows_the_rule(random_tensor((5, width)), "nvfp4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_inputs_are_widened_exactly(name, dtype):
    x = torch.randn(9, 160, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0], x[1, 40], x[2, 70] = torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4, torch.inf
    q = assert_follows_the_rule(x, name)
    assert_equal(q, mm.quantize(x.float(), name))


@pytest.mark.parametrize("name", NAMES)
def test_strides_do_not_matter(name):
    base = random_tensor((6, 320, 160))
    views = {
        "transposed": base[0, :160].T,
        "every other row and column": base[0, ::2, ::5],
        "columns from the middle": base[1, :, 32:128],
        "permuted": base[:, :128, :64].permute(1, 0, 2),
        "expanded": base[0, :1, :64].expand(130, 64),
        "flipped": base[:, :7].flip(0),
    }
    for what, view in views.items():
        assert_equal(mm.quantize(view, name), mm.quantize(view.contiguous(), name), what)
    assert_follows_the_rule(views["transposed"], name, every=3)


@pytest.mark.parametrize("shape", [(0, 32), (0, 5, 32), (3, 0, 32), (2, 0, 5, 32)], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "bf16"])
def test_tensors_without_rows_are_quantised_to_nothing(name, shape):
    q = mm.quantize(torch.empty(shape), name)
    assert q.shape == shape
    assert mm.dequantize(q).shape == shape


@pytest.mark.parametrize("shape", [(0, 32), (4, 0, 32)], ids=str)
def test_tensors_without_rows_take_a_global_scale_per_leading_index(shape):
    q = mm.quantize(torch.empty(shape), "nvfp4", global_scale=torch.ones(shape[0]))
    assert mm.dequantize(q).shape == shape


@pytest.mark.parametrize("chunk", [1, 100, 32 * 128, 5000, 288 * 128 * 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_chunk_size_does_not_change_a_bit(name, chunk, monkeypatch):
    x = random_tensor((2, 300, 288), seed=2)
    g = torch.rand(2, 300, generator=torch.Generator().manual_seed(2)) + 0.1
    g = g if name == "nvfp4" else None
    want = mm.quantize(x, name, global_scale=g)
    monkeypatch.setattr(implementation, "CHUNK", chunk)
    assert_equal(mm.quantize(x, name, global_scale=g), want)


def test_the_chunk_size_does_not_change_the_weight_global_scale(monkeypatch):
    w = random_tensor((3, 40, 64), seed=3)
    want = implementation.weight_global_scale(w)
    monkeypatch.setattr(implementation, "CHUNK", 77)
    assert torch.equal(implementation.weight_global_scale(w), want)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_quantised_like_its_members(name):
    x = random_tensor((4, 130, 160), seed=4)
    together = mm.quantize(x, name)
    for i in range(4):
        assert_equal(mm.quantize(x[i], name), together[i])


@pytest.mark.parametrize("name", NAMES)
def test_quantize_into_fills_the_given_tensors_and_slices_of_them(name):
    x = random_tensor((4, 130, 160), seed=5)
    want = mm.quantize(x, name)
    out = mm.quantize(torch.zeros_like(x), name)
    quantize_into(x[1:3], out[1:3])
    assert_equal(out[1:3], want[1:3])
    assert not bits(out.data[0]).any() and not bits(out.data[3]).any()
    quantize_into(x, out)
    assert_equal(out, want)
    with pytest.raises(ShapeError, match="got"):
        quantize_into(x[:3], out)


def test_quantize_into_uses_the_global_scale_it_is_given():
    x = random_tensor((3, 64), seed=6)
    out = mm.quantize(torch.zeros_like(x), "nvfp4", global_scale=torch.tensor([0.1, 1.0, 7.0]))
    quantize_into(x, out)
    assert_holds_the_rule(x, out)


@pytest.mark.parametrize("name", NAMES)
def test_the_input_is_left_as_it_was(name):
    x = random_tensor((5, 96), seed=7)
    x[0, 0], x[1, 1] = torch.nan, -0.0
    before = x.clone()
    mm.quantize(x, name)
    assert_same_bits(x, before, before, "input")


@pytest.mark.parametrize("name", MX)
def test_mx_values_are_their_own_quantisation(name):
    """The second scale may be smaller, never larger, so that every value is kept exactly."""
    inputs = (random_tensor((40, 96)), alone(edge_amaxes(), name), alone(finite_bf16()[::11], name))
    for x in inputs:
        once = mm.dequantize(mm.quantize(x, name))
        x = once[once.isfinite().all(dim=-1)]
        again = mm.quantize(x, name)
        assert_same_bits(mm.dequantize(again), x, x, f"{name} value")
        assert_equal(mm.quantize(mm.dequantize(again), name), again)


def test_bf16_rounds_fp32_to_nearest_even():
    near = [m + d for m in (0, 0x8000, 0x18000, 0x7F8000) for d in (-1, 0, 1)]
    sizes = [(e << 23) + m for e, m in itertools.product(range(255), near)]
    sizes = [s for s in sizes if 0 <= s < oracle.INF32] + [oracle.INF32]
    patterns = [s | sign for s in sizes for sign in (0, oracle.FP32.sign)]
    patterns += [0] * (-len(patterns) % 32)
    q = mm.quantize(from_bits(patterns).reshape(-1, 32), "bf16")
    for pattern, code in zip(patterns, bits(q.data).flatten().tolist(), strict=True):
        assert code == oracle.encode_signed(pattern, oracle.BF16), f"from {pattern:#010x}"
    assert torch.equal(bits(mm.dequantize(q)), bits(q.data) << 16)


def test_bf16_keeps_nan_in_its_place():
    x = torch.ones(1, 32)
    x[0, 3] = torch.nan
    y = mm.dequantize(mm.quantize(x, "bf16"))
    assert y.isnan().nonzero().tolist() == [[0, 3]]


def test_a_maximum_shared_by_a_square_block_reaches_every_row():
    x = beside(finite_bf16()[::3], 448.0, "fp8_128x128")
    q = mm.quantize(x.reshape(-1, 128), "fp8_128x128")
    assert set(q.scale.flatten().tolist()) == {1.0}
