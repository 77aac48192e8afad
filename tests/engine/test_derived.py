"""Scales that the Blackwell backend places: graphs see what experts were written to."""

from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe import reference
from megamoe.engine import derived, graphs, layer, planning
from megamoe.engine.blackwell import BLACKWELL
from megamoe.errors import NotAvailable
from megamoe.kernels.blackwell.weights import place, place_into
from megamoe.layout.regions import align_up
from tests.engine.pretended import E, H, I, K, tokens
from tests.pretending import pretend_b200

pytest.importorskip("triton")
RECIPES = ("w4a8", "nvfp4", "w8a8", "bf16")


def experts(recipe, seed=0, inter=I, hidden=H):
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(E, 2 * inter, hidden, generator=rng).bfloat16() * 4.0**seed
    w2 = torch.randn(E, hidden, inter, generator=rng).bfloat16()
    return mm.ExpertWeights.quantize(w13, w2, recipe)


def read(placed, like):
    """The matrix that kernels read: codes and scales as they were placed."""
    parts = {"data": unpadded(placed.data, like.data)}
    if placed.scale is not None:
        groups = like.scale.shape[-1]
        scale = taken_back(placed.scale.view(torch.uint8), groups).flatten(0, 1)
        parts["scale"] = unpadded(scale, like.scale)
        if placed.factor is not None:
            parts["global_scale"] = placed.factor
    elif placed.factor is not None:
        parts["scale"] = placed.factor.view_as(like.scale)
    return replace(like, **parts)


def taken_back(placed, groups):
    """Bytes [blocks, 128, groups], as they were before they were placed."""
    _, blocks, wide, _, _ = placed.shape
    parts = placed.view(blocks, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return parts.reshape(blocks, 128, wide * 4)[:, :, :groups]


def unpadded(rows, like):
    """[matrices * blocks * 128, columns] without the rows and columns that fill blocks."""
    *lead, num, wide = like.shape
    matrices = rows.view(*lead, align_up(num, 128), -1)
    return matrices[..., :num, :wide].contiguous().view(like.dtype)


@pytest.fixture
def blackwell_gpu(cuda, monkeypatch):
    """The pretended GPU, whose graphs read what `prepare` placed at their capture."""
    monkeypatch.setattr(layer, "choose", lambda *wanted: ("blackwell", planning.Traits(), ""))
    pretend_b200(monkeypatch)

    def launch(call, plan):
        w, num = call.weights, call.num_valid
        ready = BLACKWELL.prepare(w)
        y = torch.empty_like(call.x)

        def run():
            now = replace(w, w13=read(ready.w13, w.w13), w2=read(ready.w2, w.w2))
            legal = call.topk_idx.masked_fill((torch.arange(len(y)) >= num)[:, None], -1)
            y.copy_(reference.moe(call.x, legal, call.topk_weights, now, call.options, None))

        cuda.do(run)
        return y

    monkeypatch.setattr(graphs, "launch", launch)
    return cuda


@pytest.mark.parametrize("write", ["refresh", "copy_"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_have_the_experts_of_now(recipe, write, blackwell_gpu):
    one, new, inputs = mm.MoE(experts(recipe), E, K, cuda_graphs=True), experts(recipe, 1), tokens()
    first = one(*inputs)
    captured = list(one._graphs._captured.values())
    if write == "refresh":
        one.refresh(new.w13, new.w2)
    else:
        for name, t in one.weights.state_dict().items():
            t.copy_(new.state_dict()[name])
    again = one(*inputs)
    assert torch.equal(again, mm.moe(*inputs, new, backend="reference"))
    assert not torch.equal(first, again)
    if write == "refresh":  # graphs that a caller captured are as good as the layer's
        assert list(one._graphs._captured.values()) == captured


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("inter", "hidden"), [(128, 256), (I, H)], ids=["whole", "padded"])
def test_other_weights_are_placed_where_the_first_were(recipe, inter, hidden):
    w, new = experts(recipe, 0, inter, hidden), experts(recipe, 1, inter, hidden)
    for name in ("w13", "w2"):
        held, other = getattr(w, name), getattr(new, name)
        placed, wanted = place(held), place(other)
        before = [t.data_ptr() for t in (placed.data, placed.scale, placed.factor) if t is not None]
        for n, t in held.tensors().items():
            t.copy_(other.tensors()[n])
        place_into(placed, held)
        parts = [(getattr(placed, n), getattr(wanted, n)) for n in ("data", "scale", "factor")]
        there = [(a, b) for a, b in parts if a is not None]
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in there)
        assert [a.data_ptr() for a, _ in there] == before
        rows = align_up(held.shape[-2], 128) * (2 if name == "w13" else 1)
        assert len(placed.data) == E * rows


@pytest.mark.parametrize("is_inference", [False, True])
def test_what_was_made_is_written_over_and_not_made_twice(is_inference):
    w, new = experts("w4a8").w2, experts("w4a8", 1).w2
    with torch.inference_mode(is_inference):
        placed = derived.known(w, "placed", place, place_into)
    w.scale.copy_(new.scale)
    assert derived.known(w, "placed", place, place_into) is placed
    assert torch.equal(placed.scale, place(w).scale)


def test_scales_that_no_kernel_decodes_are_refused_before_a_write():
    one = mm.MoE(experts("w4a16"), E, K, backend="reference")
    BLACKWELL.prepare(one.weights)
    new = experts("w4a16", 1)
    new.w2.scale[2, 0, 0] = 0
    before = one.weights.w13.data.clone()
    with pytest.raises(NotAvailable, match="w2 must have scales of 2"):
        one.refresh(new.w13, new.w2)
    assert torch.equal(one.weights.w13.data, before)


def test_a_capture_finds_weights_that_were_placed(monkeypatch):
    w = experts("w4a8").w2
    monkeypatch.setattr(derived, "is_capturing", lambda device: True)
    with pytest.raises(NotAvailable, match="make the call once before the capture"):
        derived.known(w, "placed", place, place_into)
