"""Copies of weights are never out of date unseen: writes that torch counts, and all others."""

from types import SimpleNamespace

import pytest
import torch

import megamoe as mm
from megamoe.engine import fingerprint
from megamoe.engine.fingerprint import LOOK_EVERY, Seal, counted
from megamoe.engine.images import prepared, verify
from megamoe.errors import RangeError

E, I, H = 3, 96, 64


def experts(recipe="w4a16", seed=0):
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(E, 2 * I, H, generator=rng)
    return mm.ExpertWeights.quantize(w13, torch.randn(E, H, I, generator=rng), recipe)


def plainly(t, value):
    t.copy_(value)


def under_inference_mode(t, value):
    with torch.inference_mode():
        t.copy_(value)


def through_data(t, value):
    t.data.copy_(value)


def through_an_alias(t, value):
    torch.empty(0, dtype=t.dtype).set_(t.untyped_storage(), 0, t.shape, t.stride()).copy_(value)


def by_foreign_code(t, value):
    t.detach().view(torch.uint8).numpy()[...] = value.view(torch.uint8).numpy()


WRITES = [plainly, under_inference_mode, through_data, through_an_alias, by_foreign_code]


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_an_image_is_of_the_bytes_that_are_there(write, made_in_inference_mode):
    with torch.inference_mode(made_in_inference_mode):
        w, other = experts(), experts(seed=1)
    mine, wanted = w.w2, other.w2  # which others hold too
    before = prepared(w)
    write(mine.data, wanted.data)
    write(mine.scale, wanted.scale)
    assert torch.equal(prepared(w).w2.data, prepared(other).w2.data)
    assert prepared(w).w13.data is before.w13.data


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("whole", [True, False])
def test_a_seal_holds_until_an_expert_changes(write, whole, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1 << 30 if whole else 0)
    rng = torch.Generator().manual_seed(0)
    t = torch.randn(4, 2, 40, 100, generator=rng)
    seal = Seal([t, t[..., 3]])
    assert seal.holds([t, t[..., 3]])
    reordered = t.clone()
    reordered[[1, 2]] = t[[2, 1]]
    write(t, reordered)
    assert not seal.holds([t, t[..., 3]])


def test_one_byte_of_a_small_tensor_is_enough():
    t = torch.zeros(2, 50, 50, dtype=torch.uint8)
    seal = Seal([t])
    t.data[1, 49, 49] = 1
    assert not seal.holds([t])


def test_a_layers_buffers_are_counted_wherever_they_come_from():
    with torch.inference_mode():
        layer = mm.MoE(experts(), E, 2)
        layer.to("cpu")
        tensors = {k: t.clone() for k, t in layer.state_dict().items()}
    layer.load_state_dict(tensors, assign=True)
    assert not any(t.is_inference() for t in layer.weights.state_dict().values())
    held = {t.data_ptr() for t in layer.weights.state_dict().values()}
    assert held == {t.data_ptr() for t in layer.experts.buffers()}
    layer.load_state_dict(tensors)  # beside what was assigned, which is the caller's
    version = layer.weights.w13.data._version
    layer.load_state_dict(tensors)
    assert layer.weights.w13.data._version > version


def test_a_layer_made_under_inference_mode_runs_outside_of_it():
    x, idx = torch.ones(3, H).bfloat16(), torch.tensor([[0, 1], [1, 2], [2, 0]])
    with torch.inference_mode():
        layer = mm.MoE(experts(), E, 2)
        inside = layer(x, idx, torch.ones(3, 2))
    assert torch.equal(layer(x, idx, torch.ones(3, 2)), inside)
    assert layer.stats.tolist() == [4, 4, 4]


class OnGpu:
    """As much of a CUDA tensor as a seal's counters read."""

    is_cuda = True

    def __init__(self, t):
        self._t = t

    def __getattr__(self, name):
        return getattr(self._t, name)


def test_on_a_gpu_uncounted_writes_are_refused_after_the_next_look(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    t = torch.zeros(2, 50, 50)
    seen = [OnGpu(t)]
    seal = Seal(seen)
    through_data(t, torch.ones(2, 50, 50))
    for _ in range(LOOK_EVERY):
        assert seal.holds(seen)  # the last one looks; what it found travels by itself
    with pytest.raises(RangeError, match="change where torch counts it"):
        seal.holds(seen)
    plainly(t, torch.zeros(2, 50, 50))
    assert not seal.holds(seen)


def test_on_a_gpu_tensors_without_a_counter_are_refused():
    t = SimpleNamespace(is_cuda=True, is_inference=lambda: True)
    with pytest.raises(RangeError, match="inference_mode"):
        Seal([t])


def test_replayed_graphs_look_at_what_was_packed():
    w = experts()
    mine = w.w13
    prepared(w)
    verify(w, None)
    through_data(mine.scale, mine.scale + 1)
    with pytest.raises(RangeError, match="change where torch counts it"):
        verify(None, w)


def test_an_alias_has_the_strides_of_what_it_stands_for():
    with torch.inference_mode():
        t = torch.arange(24.0).view(4, 6).t()[1:, ::2]
    alias = counted(t)
    assert torch.equal(alias, t) and alias.stride() == t.stride() and not alias.is_inference()


@pytest.mark.parametrize("find", [
    lambda w: w.w2.data, lambda w: w.w13.scale, lambda w: w[1:].w2.data,
    lambda w: w.state_dict()["w13.data"], lambda w: w.w2.tensors()["scale"],
])  # fmt: skip
def test_a_write_to_a_copy_of_packed_experts_is_refused_and_not_lost(find):
    w = experts()
    prepared(w)
    find(w)  # reading is free
    prepared(w)
    find(w).fill_(1)
    with pytest.raises(RangeError, match="copies, which nothing reads again"):
        prepared(w)


@pytest.mark.gpu
def test_images_on_a_gpu_follow_counted_writes_and_refuse_others():
    w, other = experts().to("cuda"), experts(seed=1).to("cuda")
    mine = w.w13, w.w2
    prepared(w)
    with torch.inference_mode():
        mine[1].data.copy_(other.w2.data)
        mine[1].scale.copy_(other.w2.scale)
    assert torch.equal(prepared(w).w2.data, prepared(other).w2.data)
    mine[0].data.data[1].copy_(other.w13.data[1])
    with pytest.raises(RangeError, match="change where torch counts it"):
        for _ in range(LOOK_EVERY + 1):
            prepared(w)
