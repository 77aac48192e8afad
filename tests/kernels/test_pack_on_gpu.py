"""Images of FP4 written by a kernel have the bytes of `pack.write`."""

from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe.engine import images, packing
from megamoe.engine.refresh import Refresh
from megamoe.kernels.hopper.weights import pack, pack_on_gpu
from megamoe.planner.tables.hopper import PACK_WARPS
from tests.kernels.compiling import Stand, compile_kernel, resources
from tests.kernels.support import DEVICE, INTERPRETED, MARKS

DEV = torch.device(DEVICE)
KINDS = {"e4m3_image": "w4a8_block", "placed_image": "w4a16", "mx_image": "w4a16",
         "nv_image": "nvfp4"}  # fmt: skip
NUM, PLACES = 2, (4, 0)  # experts that are written, and where


def experts(kind, intermediate, hidden):
    """Matrices with groups of zeros, whose scales are odd, and rows of nothing else."""
    rng = torch.Generator().manual_seed(0)
    w13 = torch.randn(NUM, 2 * intermediate, hidden, generator=rng)
    w2 = torch.randn(NUM, hidden, intermediate, generator=rng)
    w = mm.ExpertWeights.quantize(w13, w2, KINDS[kind])
    for part in (w.w13, w.w2):
        rows = part.data.flatten(0, -2)
        rows[5] = 0
        rows[1, :16] = 0x80  # -0
        rows[9, 16:32] = 0
        if kind != "nv_image":
            scale = part.scale.flatten(0, -2)
            scale[1, 0], scale[9, 1] = 3, 254
            scale[5] = torch.arange(scale.shape[1]) % 250
            if kind == "mx_image":
                scale[2, 1] = 200
            elif kind == "e4m3_image":
                scale[7] = 2  # powers of rows that are subnormal
    return w


@pytest.mark.parametrize(
    ("intermediate", "hidden"),
    [(64, 224), *(pytest.param(*s, marks=pytest.mark.every) for s in ((288, 352), (64, 2304)))],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_a_launch_writes_what_pack_writes_and_counts_groups_of_zeros(_, kind, intermediate, hidden):
    w = experts(kind, intermediate, hidden)
    for part in (w.w13, w.w2):
        inside = torch.cat((torch.zeros(1, dtype=torch.uint8), part.data.flatten()))[1:]
        part = replace(part, data=inside.view_as(part.data))  # words begin between words
        shape = (5, *part.shape[1:])
        wanted = pack.empty_image(kind, shape, torch.device("cpu"))
        found = pack.empty_image(kind, shape, DEV)
        for one in (wanted, found):
            for t in (one.data, one.scale, one.factor):
                if t is not None:
                    t.view(torch.int32).fill_(0x1234567)
        for i, place in enumerate(PLACES):
            pack.write(wanted, place, part[i : i + 1])
        counts = pack_on_gpu.launch(found, PLACES, part.to(DEV))
        for name in ("data", "scale", "factor"):
            a, b = getattr(wanted, name), getattr(found, name)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a.view(torch.int32), b.cpu().view(torch.int32)), name
        zeros = [int((~pack._nonzero_groups(part.data[i])).sum()) for i in range(NUM)]
        assert counts.tolist() == (zeros if kind in ("e4m3_image", "placed_image") else [0] * NUM)
        assert kind not in ("e4m3_image", "placed_image") or min(zeros) == 0 < max(zeros)


@pytest.fixture
def as_a_gpu(monkeypatch):
    """Packing on the CPU goes through the kernel, which the interpreter runs; its launches."""
    launched, real = [], pack_on_gpu.launch

    def launch(out, places, w):
        launched.append((out.kind, list(places)))
        return real(out, places, w)

    monkeypatch.setattr(pack_on_gpu, "launch", launch)
    monkeypatch.setattr(packing, "is_gpu", lambda device: True)
    packing.agrees.cache_clear()
    yield launched
    packing.agrees.cache_clear()


needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1")


def bits(w):
    return {n: t.reshape(-1).view(torch.uint8).tolist() for n, t in w.state_dict().items()}


@needs_interpreter
@pytest.mark.parametrize("kind", ["e4m3_image", "nv_image"])
def test_experts_are_packed_and_refreshed_by_one_launch_a_matrix(as_a_gpu, kind):
    w, new = experts(kind, 64, 96), experts(kind, 64, 96)
    wanted = bits(w)
    images.hold(w)
    assert w.is_packed and w.w13.kind == kind and bits(w) == wanted
    agreed, held = 2, w.w13.packed.data.data_ptr()  # launches that look whether it is right
    assert len(as_a_gpu) == 2 + agreed and as_a_gpu[1] == (kind, [0, 1])
    change = Refresh.of(w, new.w13, new.w2, [1, 0], None, None, "split")
    change.check(w)
    change.write(w)
    assert as_a_gpu[-2:] == [(kind, [1, 0])] * 2 and w.w13.packed.data.data_ptr() == held
    assert bits(w) == bits(mm.ExpertWeights.cat([new[1:], new[:1]])) != wanted


@needs_interpreter
def test_a_kernel_that_is_wrong_is_not_used(as_a_gpu, monkeypatch, caplog):
    right = pack_on_gpu.shifts("e4m3_image")
    monkeypatch.setattr(pack_on_gpu, "shifts", lambda kind: right[::-1])
    w = experts("e4m3_image", 64, 96)
    wanted = bits(w)
    images.hold(w)
    assert w.is_packed and bits(w) == wanted
    assert {places[0] for _, places in as_a_gpu} == {0} and len(as_a_gpu) == 2  # looks alone
    assert "packs e4m3_image is wrong on cpu" in caplog.text


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_it_compiles_for_hopper_without_a_stack(kind, gated):
    u8, i32, i64, f32 = map(Stand, (torch.uint8, torch.int32, torch.int64, torch.float32))
    made = compile_kernel(
        pack_on_gpu._pack_experts_kernel,
        (i32, u8, i32, i32, u8, i32, i64, 0, 4096, 2048, 512), 90, GATED=gated,
        E4M3=kind == "e4m3_image", PLACED=kind == "placed_image",
        PER_BLOCK=8 if kind == "nv_image" else 4, MOVES=pack_on_gpu.moves(kind), LISTED=False,
        num_warps=PACK_WARPS,
    )  # fmt: skip
    assert resources(made)["stack"] == 0 and resources(made)["registers"] <= 64
    assert made.asm["ptx"].count("ld.global.v4") == made.asm["ptx"].count("st.global.v4") == 4
    made = compile_kernel(
        pack_on_gpu._row_powers_kernel, (i32, u8, i32, f32, i64, 0, 4096, 2048, 512), 90,
        GATED=gated, LISTED=False, ROWS=pack_on_gpu.POWER_ROWS,
        GROUPS=pack_on_gpu.POWER_GROUPS, num_warps=PACK_WARPS,
    )  # fmt: skip
    assert resources(made)["stack"] == 0
