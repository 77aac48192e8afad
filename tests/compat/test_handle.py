"""Weights that the engine holds alone: keep=False gives handles, which calls take and none reads."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.compat import deep_gemm
from megamoe.compat.deep_gemm import prepared
from megamoe.errors import NotAvailable, RangeError
from tests.compat.support import Case, E, H, I
from tests.engine.conftest import gpu  # noqa: F401


def handed(case):
    """The same case with handles, and where its weights lay."""
    plain = case.plain if isinstance(case.plain[0], tuple) else [(t,) for t in case.plain]
    refs = [StorageWeakRef(t.untyped_storage()) for pair in plain for t in pair]
    case.l1, case.l2 = deep_gemm.transform_weights_for_mega_moe(
        *case.plain, mma_type=case.mma_type, keep=False
    )
    return case, refs


def parts(case):
    return [t for one in (case.l1, case.l2) for t in (one if isinstance(one, tuple) else (one,))]


@pytest.mark.parametrize("mma_type", ["fp8xfp4", "mxf4xmxf4", "bf16xbf16"])
def test_calls_have_the_same_bits(mma_type):
    case = Case(mma_type, 9)
    buffer = case.buffer()
    case.fill(buffer)
    wanted = case.run(buffer)
    before = [(t.shape, t.dtype, t.device, t.stride()) for t in parts(case)]
    case, _ = handed(case)
    assert [(t.shape, t.dtype, t.device, t.stride()) for t in parts(case)] == before
    assert torch.equal(case.run(buffer), wanted)
    if mma_type != "bf16xbf16":
        case.l1, case.l2 = (  # as servers keep them
            tuple(torch.nn.Parameter(t, requires_grad=False) for t in pair)
            for pair in (case.l1, case.l2)
        )
        assert torch.equal(case.run(buffer), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("mma_type", ["fp8xfp4", "mxf4xmxf4", "bf16xbf16"])
def test_a_gpu_has_the_same_bits_and_one_copy(mma_type):
    case = Case(mma_type, 9, device="cuda")
    buffer = case.buffer()
    case.fill(buffer)
    wanted = case.run(buffer)
    case, refs = handed(case)
    assert torch.equal(case.run(buffer), wanted)
    case.plain = None
    prepared.forget_dropped()
    gc.collect()
    held = weakly(parts(case)[0].holder.experts)
    assert {ref for ref in refs if not ref.expired()} <= set(held)  # what the engine reads as it is


def test_handles_are_taken_in_any_mode_and_not_saved(tmp_path):
    case = Case("fp8xfp4", 5)
    buffer = case.buffer()
    case.fill(buffer)
    wanted = case.run(buffer)
    with torch.inference_mode():
        case, _ = handed(case)
        assert torch.equal(case.run(buffer), wanted)
    assert torch.equal(case.run(buffer), wanted)
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(case.l1[0], requires_grad=False)
    assert module.state_dict()["w"].shape == case.l1[0].shape
    with pytest.raises(NotAvailable, match="keep=False have no bytes"):
        torch.save(module.state_dict(), tmp_path / "w.pt")
    with pytest.raises(NotAvailable, match="keep=False have no bytes"):
        module.to(torch.float32)
        module.double()


def test_hoppers_fp8_weights_too():
    rng = torch.Generator().manual_seed(0)
    weights = [
        (torch.randn(E, *shape, generator=rng).to(torch.float8_e4m3fn),
         torch.rand(E, shape[0] // 128, shape[1] // 128, generator=rng))
        for shape in ((2 * I, H), (H, I))
    ]  # fmt: skip
    both = [deep_gemm.transform_weights_for_mega_moe_sm90(*weights, keep=k) for k in (True, False)]
    one, two = (
        prepared.prepare(prepared.read_source(*pair), False).experts.state_dict() for pair in both
    )
    assert all(torch.equal(t.view(torch.uint8), two[n].view(torch.uint8)) for n, t in one.items())


def test_nothing_but_images_is_left_on_hopper(gpu):  # noqa: F811
    case, refs = handed(Case("fp8xfp4", 5))
    case.plain = None
    prepared.forget_dropped()
    buffer = case.buffer(backend="hopper")
    case.fill(buffer)
    holder = case.l1[0].holder
    layer = holder.layer("w4a8", E, 2, None, backend="hopper", max_tokens_per_rank=384)
    gc.collect()
    assert layer.weights.is_packed and holder.experts is layer.weights
    assert all(ref.expired() for ref in refs)
    other = holder.layer("w4a4", E, 2, None, backend="hopper")
    assert other.weights.w13 is layer.weights.w13  # the same images
    images = {id(t): t.nbytes for t in layer.weights.held().values()}
    assert sum(images.values()) == holder.experts.nbytes
    seen = weakly(layer.weights)
    del case, holder, layer, other, images
    gc.collect()
    assert all(ref.expired() for ref in seen)  # they live as long as a handle of them


def weakly(weights):
    return [StorageWeakRef(t.untyped_storage()) for t in weights.held().values()]


def test_with_keep_the_engine_has_images_beside_the_callers_tensors_and_nothing_else(gpu):  # noqa: F811
    case = Case("fp8xfp4", 5)
    (holder,) = [one for key, one in prepared._PREPARED.items() if key[1] == case.l1[0].data_ptr()]
    copy = StorageWeakRef(holder.experts.w13.data.untyped_storage())
    layer = holder.layer("w4a4", E, 2, None, backend="hopper")
    gc.collect()
    assert layer.weights.is_packed and holder.experts.is_packed and copy.expired()
    assert holder.experts.recipe == "w4a8" and holder.experts.w13 is layer.weights.w13


ACTS = {
    "read": lambda t: t + 1, "copied": lambda t: t.clone(), "moved": lambda t: t.to("meta"),
    "sliced": lambda t: t[0], "compared": lambda t: torch.equal(t, t), "numpy": lambda t: t.numpy(),
    "written": lambda t: t.copy_(torch.zeros(t.shape, dtype=t.dtype)), "zeroed": lambda t: t.zero_(),
    "through data": lambda t: t.data, "an address": lambda t: t.data_ptr(),
    "its storage": lambda t: t.untyped_storage(), "items": lambda t: t.tolist(),
    "an item": lambda t: t.__setitem__(0, 0), "viewed": lambda t: t.view(torch.uint8),
    "a result": lambda t: torch.zeros(t.shape, dtype=t.dtype).copy_(t),
}  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
def test_handles_are_not_read_and_not_written(act):
    case, _ = handed(Case("fp8xfp4", 1))
    for t in parts(case):
        with pytest.raises(NotAvailable, match=r"keep=False have no bytes.*got \w+; transform"):
            ACTS[act](t)
        assert repr(t).startswith("Handle(l")


def test_handles_of_two_transforms_or_in_another_place_are_refused():
    one, _ = handed(Case("fp8xfp4", 3))
    other, _ = handed(Case("fp8xfp4", 3, seed=1))
    buffer = one.buffer()
    one.fill(buffer)
    for l1, l2 in (
        (one.l1, other.l2),
        ((one.l1[0], other.l1[1]), one.l2),
        (one.l1, Case("fp8xfp4", 3).l2),
    ):
        mixed = Case("fp8xfp4", 3)
        mixed.l1, mixed.l2 = l1, l2
        with pytest.raises(RangeError, match="those of one transform"):
            mixed.run(buffer)
    fp4 = Case("mxf4xmxf4", 3).buffer()
    with pytest.raises(RangeError, match="transformed for the mma_type of the buffer"):
        one.run(fp4)


def test_weights_that_no_engine_holds_at_once_are_refused():
    words = torch.zeros(E, 2 * I, H // 64, dtype=torch.int32)
    nvfp4 = (torch.zeros(E, 2 * I, H // 2, dtype=torch.int8), words)
    down = (torch.zeros(E, H, I // 2, dtype=torch.int8), torch.zeros(E, H, I // 64).int())
    with pytest.raises(NotAvailable, match="NVFP4, whose factors come with the call"):
        deep_gemm.transform_weights_for_mega_moe(nvfp4, down, keep=False)
    with pytest.raises(NotAvailable, match="shared experts"):
        deep_gemm.transform_weights_for_mega_moe(
            torch.zeros(2 * I, H).bfloat16(), torch.zeros(H, I).bfloat16(), keep=False
        )
