"""Experts are packed where they lie if nobody can miss their bytes, and never otherwise."""

from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import megamoe as mm
from megamoe.engine import images, in_place, packing
from megamoe.engine.packed import PackedMatrix
from tests.kernels.support import INTERPRETED

E, W = 3, 256


@pytest.fixture(
    params=[pytest.param(INTERPRETED, marks=pytest.mark.interpreted if INTERPRETED else ())]
)
def as_a_gpu(request, monkeypatch):
    """A CPU that packs where experts lie, by the kernel in the interpreter or by torch."""
    real, packs = packing.is_gpu, request.param
    monkeypatch.setattr(packing, "is_gpu", lambda device: packs or real(device))
    monkeypatch.setattr(in_place, "_is_gpu", lambda device: True)
    packing.agrees.cache_clear()
    yield packs
    packing.agrees.cache_clear()


def experts(recipe, hidden=W, intermediate=W):
    rng = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * intermediate, hidden, generator=rng)
    w2 = torch.randn(E, hidden, intermediate, generator=rng)
    w13[1, 3, :64], w2[2, 5] = 0, 0  # groups of zeros
    w = mm.ExpertWeights.quantize(w13, w2, "w4a8_block" if recipe == "placed" else recipe)
    if recipe == "mx":
        w.w13.scale[0, 0, 0, 0] = w.w2.scale[0, 0, 0] = 200
    return w


RECIPES = {"w4a8_block": "e4m3_image", "w4a8": "placed_image", "nvfp4": "nv_image"}
ONE_BY_KERNEL = [  # in the interpreter; whose memory it is does not depend on the recipe
    pytest.param(recipe, marks=pytest.mark.every if INTERPRETED and i else ())
    for i, recipe in enumerate(RECIPES)
]


def bits(w):
    return {n: t.reshape(-1).view(torch.uint8).clone() for n, t in w.state_dict().items()}


def is_same(w, before):
    now = bits(w)
    return now.keys() == before.keys() and all(torch.equal(now[n], before[n]) for n in now)


def storages(w):
    return [part.data.untyped_storage().data_ptr() for part in (w.w13, w.w2)]


def of_images(w):
    return [part.packed.data.untyped_storage().data_ptr() for part in (w.w13, w.w2)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_images_lie_where_the_canonical_bytes_lay(as_a_gpu, recipe):
    w = experts(recipe)
    before, at = bits(w), storages(w)
    scales = [StorageWeakRef(part.scale.untyped_storage()) for part in (w.w13, w.w2)]
    images.hold(w)
    assert w.w13.kind == w.w2.kind == RECIPES[recipe] and is_same(w, before)
    assert of_images(w) == at
    assert all(ref.expired() == (recipe == "w4a8_block") for ref in scales)
    assert w.w13.source is None and w.w2.source is None
    other = experts(recipe)
    kept = other.w13.data, other.w2.data
    images.hold(other)
    for a, b in zip((w.w13, w.w2), (other.w13, other.w2), strict=True):
        for name, t in a.held().items():
            assert torch.equal(t, b.held()[name]), name
    assert not set(of_images(other)) & {t.untyped_storage().data_ptr() for t in kept}


HOLDERS = {
    "matrix": lambda w: w.w13,
    "tensor": lambda w: w.w13.data,
    "slice": lambda w: w[1:2],
    "alias": lambda w: w.w13.data.detach(),
    "storage": lambda w: w.w13.data.untyped_storage(),
    "numpy": lambda w: w.w13.data.numpy(),
    "dlpack": lambda w: torch.utils.dlpack.to_dlpack(w.w13.data),
    "twin": lambda w: replace(w, b2=torch.zeros(E, W)),
    "parameter": lambda w: torch.nn.Parameter(w.w13.data, requires_grad=False),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("recipe", ONE_BY_KERNEL)
def test_bytes_that_others_hold_stay_as_they_are(as_a_gpu, recipe, holder):
    w = experts(recipe)
    before, at, seen = bits(w), storages(w), HOLDERS[holder](w)
    copy = w.w13.data.clone()
    images.hold(w)
    assert is_same(w, before) and of_images(w)[0] != at[0]
    assert (of_images(w)[1] == at[1]) == (holder not in ("slice", "twin"))
    bytes_ = torch.empty(0, dtype=torch.uint8)
    if holder == "storage":
        assert torch.equal(bytes_.set_(seen), copy.flatten())
    elif holder == "tensor":
        assert torch.equal(seen, copy)
    elif holder == "twin":
        assert torch.equal(seen.w13.data, copy)


@pytest.mark.parametrize("name", ["scale", "global_scale"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_that_others_hold_stay_as_they_are_and_are_watched(as_a_gpu, recipe, name):
    w = experts(recipe)
    before, mine = bits(w), getattr(w.w2, name)
    if mine is None:
        return
    copy = mine.clone()
    images.hold(w)
    assert is_same(w, before) and torch.equal(mine.view(torch.uint8), copy.view(torch.uint8))
    mine.view(torch.uint8).flatten()[:4] = 120
    assert images.has_changed(w)


def test_experts_whose_image_is_larger_or_that_are_part_of_a_storage_are_packed_beside(
    as_a_gpu, monkeypatch
):
    made, real = [], in_place.packed
    monkeypatch.setattr(in_place, "packed", lambda *how: made.append(real(*how)) or made[-1])
    whole = experts("w4a8")
    part = whole[1:]
    del whole
    for w in (experts("w4a8", hidden=W + 32), part):
        before = bits(w)
        images.hold(w)
        assert w.is_packed and is_same(w, before)
    assert made == [None] * 4


class Stop(BaseException):
    pass


@pytest.mark.parametrize("when", range(-1, 2 * E + 1))
@pytest.mark.parametrize("recipe", ONE_BY_KERNEL)
def test_what_is_interrupted_leaves_every_bit_in_its_place(as_a_gpu, recipe, when, monkeypatch):
    w = experts(recipe)
    before, at, calls = bits(w), storages(w), []
    real_write, real_image = packing.write, in_place._Memory.image

    def counted(real):
        def call(*args):
            calls.append(real)
            if len(calls) == when + 1:
                if real is real_write:
                    args[0].packed.data[args[1][0]] = 77  # half of it
                raise Stop
            return real(*args)

        return call

    def stop(device):
        raise Stop

    monkeypatch.setattr(packing, "write", counted(real_write))
    monkeypatch.setattr(in_place._Memory, "image", counted(real_image))
    if when < 0:
        monkeypatch.setattr(in_place, "_synchronise", stop)
    with pytest.raises(Stop):
        images.hold(w)
    monkeypatch.undo()
    assert is_same(w, before)
    assert not isinstance(w.w2, PackedMatrix) and storages(w)[1] == at[1]
    assert w.w13.data.untyped_storage().data_ptr() == at[0] or isinstance(w.w13, PackedMatrix)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["w4a8_block", "w4a16", "nvfp4"])
def test_on_a_gpu_two_experts_more_are_enough(recipe):
    num, hidden, intermediate = 16, 1024, 512
    rng = torch.Generator(device="cuda").manual_seed(0)
    w13 = torch.randn(num, 2 * intermediate, hidden, generator=rng, device="cuda").bfloat16()
    w2 = torch.randn(num, hidden, intermediate, generator=rng, device="cuda").bfloat16()
    images.hold(mm.ExpertWeights.quantize(w13[:1], w2[:1], recipe))  # kernels are there
    w = mm.ExpertWeights.quantize(w13, w2, recipe)
    before, at, size = bits(w), storages(w), w.nbytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    was = torch.cuda.memory_allocated()
    layer = mm.MoE(w, num, 2, backend="hopper")
    peak = torch.cuda.max_memory_allocated() - was
    assert of_images(w) == at and layer.weights is w and is_same(w, before)
    assert peak <= 2 * size / num + (1 << 20)  # beside them status and seals
    shared = mm.ExpertWeights.quantize(w13, w2, recipe)
    part = shared[1:2]
    wanted = part.w13.data.clone()
    images.hold(shared)
    assert torch.equal(part.w13.data, wanted) and is_same(shared, before)
