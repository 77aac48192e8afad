"""Tensor descriptors of launches: checked once for a form, made anew for each call's memory."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import megamoe as mm
from megamoe.engine.call import Call
from megamoe.engine.functional import launch as launch_call
from megamoe.engine.recording import LayerSpec, recorded, target_of
from megamoe.engine.status import DeviceStatus
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.weights import pack
from tests.kernels.support import INTERPRETED

E, I, H, K = 4, 128, 256, 2
MACHINE = ("NVIDIA H200", 132, "sm_90a", 141 << 30)
MODES = [("w4a8_block", "fused"), ("w4a8_block", "staged"), ("w8a8", "fused"), ("bf16", "staged")]


def experts(recipe):
    rng = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * I, H, generator=rng)
    return mm.ExpertWeights.quantize(w13, torch.randn(E, H, I, generator=rng), recipe)


def fields(one):
    return {**one.__dict__, "base": one.base.data_ptr()}


@pytest.mark.parametrize("recipe", ["w8a8", "bf16"])
def test_gate_and_up_are_described_as_their_view_would_be(recipe):
    w = pack.pack(experts(recipe).w13, to_e4m3=False)
    found, _ = launch.weight_descriptors(w, 1, 256)
    t = w.data.view(E, 2, I // 8, 8, H).transpose(1, 2)
    layout = gl.NVMMASharedLayout(128, 8 * t.element_size(), rank=5)
    wanted = TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 16, 2, 8, 128], layout)
    assert fields(found) == fields(wanted) and found.base.dtype == t.dtype


def test_a_descriptor_is_of_the_memory_that_is_given_and_keeps_none():
    a, b = torch.zeros(64, 256), torch.ones(64, 256)
    first, second = (launch.token_descriptor(t, 32) for t in (a, b))
    assert first.base is a and second.base is b and first.layout is second.layout
    gone = weakref.ref(a)
    del a, first
    gc.collect()
    assert gone() is None
    with pytest.raises(AssertionError, match="16 bytes"):
        launch.token_descriptor(torch.zeros(64 * 256 + 1)[1:].view(64, 256), 32)


class Empties(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes no descriptors")
@pytest.mark.parametrize(("recipe", "mode"), MODES)
def test_a_second_call_checks_no_descriptor_and_makes_no_view(recipe, mode, monkeypatch):
    overrides = (("backend", "hopper"), ("mode", mode))
    layer, w = LayerSpec(recipe, H, I, E, K, MACHINE, overrides=overrides), experts(recipe)
    made, real = [], launch.TensorDescriptor.__post_init__
    monkeypatch.setattr(
        launch.TensorDescriptor, "__post_init__", lambda one: (made.append(1), real(one))
    )
    launch._form.cache_clear()
    stats, status = torch.zeros(E, dtype=torch.int64), DeviceStatus(torch.device("cpu"))
    x, idx = torch.zeros(16, H).bfloat16(), torch.zeros(16, K, dtype=torch.int64)

    def call(given):
        with recorded(target_of(layer.hardware)) as seen, Empties() as ops:
            rest = given, layer.options, None, status, stats
            launch_call(Call(x, idx, torch.ones(16, K), *rest), layer.plan(16))
        return set(seen), ops.seen

    first, _ = call(w)
    num, _ = len(made), made.clear()
    again, ops = call(w)
    assert num > 0 and not made and again == first
    assert ops["aten.empty.memory_format"] <= 13 and not ops["aten.transpose.int"]
    moved, _ = call(experts(recipe))
    assert moved == first and not made
