"""Images of FP4 written by a kernel have the bytes of `pack.write`."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import megamoe as mm
from megamoe.engine import images, packing
from megamoe.engine.refresh import Refresh
from megamoe.kernels.common import finite
from megamoe.kernels.hopper.weights import facts_on_gpu, pack, pack_on_gpu
from megamoe.kernels.portable import quantise_weights
from megamoe.kernels.portable.acts import CODES
from tests.kernels.compiling import Stand, compile_kernel, resources
from tests.kernels.support import DEVICE, INTERPRETED, MARKS, in_interpreter

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
        flags = pack_on_gpu.launch(found, PLACES, part.to(DEV)).tolist()
        counts = flags[3 + (2 if found.is_gated else 3) * NUM :][:NUM]
        assert not any(flags[: 3 + 2 * NUM])
        for name in ("data", "scale", "factor"):
            a, b = getattr(wanted, name), getattr(found, name)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a.view(torch.int32), b.cpu().view(torch.int32)), name
        if kind not in ("e4m3_image", "placed_image"):
            assert not any(counts)
            continue
        odd = ~pack._nonzero_groups(part.data) & (part.scale != 127)
        assert counts == odd.flatten(1).sum(1).tolist() and min(counts) == 0 < max(counts)


@pytest.fixture
def as_a_gpu(monkeypatch):
    """Packing on the CPU goes through the kernel, which the interpreter runs; its launches."""
    launched, real = [], pack_on_gpu.launch_both

    def launch(images, places, *rest, **options):
        launched.extend((out.kind, list(places)) for out in images if out is not None)
        return real(images, places, *rest, **options)

    monkeypatch.setattr(pack_on_gpu, "launch_both", launch)
    monkeypatch.setattr(packing, "is_gpu", lambda device: True)
    packing.agrees.cache_clear()
    yield launched
    packing.agrees.cache_clear()


needs_interpreter = in_interpreter()


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


def floats(intermediate, hidden, dtype):
    rng = torch.Generator().manual_seed(2)
    w13 = torch.randn(NUM, 2 * intermediate, hidden, generator=rng)
    w2 = torch.randn(NUM, hidden, intermediate, generator=rng)
    for t in (w13, w2):
        t[0, 5], t[0, 7, :32], t[1, 9, 32:64] = 0, -0.0, 2.0**-130  # codes of zero, and code 0
        t[1, 11] *= 2.0**-9
    return w13.to(dtype), w2.to(dtype)


@pytest.mark.parametrize(
    ("kind", "gate_up", "dtype"),
    [
        ("e4m3_image", "interleaved", torch.bfloat16),
        ("nv_image", "split", torch.float32),
        *(
            pytest.param(*one, marks=pytest.mark.every)
            for one in product(KINDS, ("split", "interleaved"), (torch.bfloat16, torch.float32))
        ),
    ],
)
@pytest.mark.parametrize("_", [pytest.param(None, marks=MARKS)])
def test_floats_are_quantised_into_the_image_as_torch_does(_, kind, gate_up, dtype):
    given = floats(64, 96, dtype)
    new = mm.ExpertWeights.quantize(*given, KINDS[kind], gate_up=gate_up)
    parts = new.w13, new.w2
    both = [[pack.empty_image(kind, (5, *p.shape[1:]), where) for p in parts]
            for where in (torch.device("cpu"), DEV)]  # fmt: skip
    for image in (*both[0], *both[1]):
        for t in (image.data, image.scale, image.factor):
            if t is not None:
                t.view(torch.int32).fill_(0x1234567)
    for image, part in zip(both[0], parts, strict=True):
        for i, place in enumerate(PLACES):
            pack.write(image, place, part[i : i + 1])
    given = tuple(t.to(DEV) for t in given)
    flags = finite.new_flags(NUM, DEV)
    pair, num = facts_on_gpu.pair_of(given, flags)
    how = {"is_interleaved": gate_up == "interleaved"}
    largest = (None, None)
    if kind == "nv_image":
        largest = quantise_weights.look(given, flags, parts[0].spec)
    else:
        pair = facts_on_gpu.with_powers(pair, num, DEV)
        facts_on_gpu.launch(pair, num, flags, 0, has_powers=kind == "e4m3_image", **how)
        said = [facts_on_gpu.facts_of_flag(flag) for flag in flags[1 : 1 + 2 * NUM].tolist()]
        assert said == [pack.facts_of(part[i : i + 1]) for part in parts for i in range(NUM)]
    pack_on_gpu.launch_both(both[1], PLACES, pair, flags, largest, **how)
    for a, b in zip(*both, strict=True):
        for name in ("data", "scale", "factor"):
            one, other = getattr(a, name), getattr(b, name)
            assert one is None or torch.equal(one.view(torch.int32), other.cpu().view(torch.int32))
    flags[0] = 1
    before = [b.data.clone() for b in both[1]]
    pack_on_gpu.launch_both(both[1], PLACES[::-1], pair, flags, largest, **how)
    assert all(torch.equal(b.data, t) for b, t in zip(both[1], before, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_compiles_for_hopper_without_a_stack(kind, is_float):
    """Words and floats are read, and words written, 16 bytes at a time."""
    dtypes = torch.uint8, torch.int32, torch.float32, torch.bfloat16
    u8, i32, f32, bf16 = map(Stand, dtypes)
    is_nv = kind == "nv_image"
    sizes = (4096, 2048, 512, 128), (4096, 4096, 256, 64)
    source, factors = bf16 if is_float else i32, i32 if is_float else f32
    made = compile_kernel(
        pack_on_gpu._pack_experts_kernel,
        (
            tuple(pack_on_gpu.Source(source, u8, i32, *size, factors) for size in sizes),
            2 * (pack_on_gpu.Image(i32, u8, f32),), i32, i32, 0, 32,
        ), 90, KIND=kind, GATED=(True, False), INTERLEAVED=False, GLOBALS=2 * (int(is_nv),),
        MOVES=pack_on_gpu.moves(kind), LISTED=False,
        ACTS=CODES["nvfp4" if is_nv else "mxfp4"] if is_float else None,
        num_warps=pack_on_gpu.warps(kind, is_float=is_float),
    )  # fmt: skip
    registers = (98 if is_nv else 72) if is_float else 64
    assert resources(made)["stack"] == 0 and resources(made)["registers"] <= registers
    num = 8 if not is_float or is_nv else 16
    assert made.asm["ptx"].count("ld.global.v4") == num
    assert made.asm["ptx"].count("st.global.v4") == (8 if not is_float else num // 4)
