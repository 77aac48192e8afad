"""Stored orders applied to tensors: there and back, and equal to the same order by views."""

from __future__ import annotations

import pytest
import torch

from megamoe.errors import ShapeError
from megamoe.layout.tiles import RegisterImage, gate_up, utccp
from tests.formats.swizzle import swizzle, unswizzle


@pytest.mark.parametrize("index", [gate_up(192, 64, "up"), utccp(384)], ids=lambda m: m.name)
def test_unswizzle_undoes_swizzle(index):
    x = torch.randn(3, index.size, 5)
    stored = swizzle(x, index.order(), dim=1)
    assert not torch.equal(stored, x)
    assert torch.equal(unswizzle(stored, index.order(), dim=1), x)
    assert torch.equal(swizzle(unswizzle(x, index.order(), dim=-2), index.order(), dim=-2), x)


def test_gate_up_is_a_stack_of_groups():
    w = torch.arange(2 * 64 * 3).view(128, 3)
    gate, up = w[:64].view(8, 8, 3), w[64:].view(8, 8, 3)
    expected = torch.stack((gate, up), 1).reshape(128, 3)
    assert torch.equal(swizzle(w, gate_up(64, 8).order()), expected)


def test_scale_order_is_a_transpose():
    scale = torch.arange(256 * 2).view(256, 2)
    expected = scale.view(2, 4, 32, 2).transpose(1, 2).reshape(256, 2)
    assert torch.equal(swizzle(scale, utccp(256).order()), expected)


@pytest.mark.parametrize("group", [16, 32])
def test_the_register_image_is_a_permutation_of_axes(group):
    n, k = 256, 384
    image = RegisterImage(n, k, group=group)
    words = torch.arange(n * k // 8)
    # slab, warp, upper, g | K block, step, t
    axes = words.view(n // 64, 4, 2, 8, k // 128, 4, 4)
    expected = axes.permute(0, 4, 2, 1, 3, 6, 5).reshape(-1)
    assert torch.equal(swizzle(words, image.words.order()), expected)
    scales = torch.arange(n * k // group)
    expected = scales.view(n // 64, 4, 2, 8, k // 128, 128 // group)
    expected = expected.permute(0, 4, 2, 1, 3, 5).reshape(-1)
    assert torch.equal(swizzle(scales, image.scales.order()), expected)


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3]], ids=str)
def test_what_is_no_permutation_is_refused(order):
    with pytest.raises(ShapeError, match="permutation of the 3 places of dimension 0"):
        swizzle(torch.zeros(3), order)
