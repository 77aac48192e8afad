"""What kernels say of values that are to be written: the same as torch says."""

from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe.formats.quantized import Quantized
from megamoe.kernels.common import finite
from megamoe.kernels.hopper.weights import facts_on_gpu, pack
from megamoe.kernels.portable.acts import CODES
from tests.kernels.compiling import Stand, compile_kernel, resources
from tests.kernels.support import DEVICE, INTERPRETED, MARKS

DEV = torch.device(DEVICE)
ON_GPU = [pytest.param(None, marks=MARKS)]
RULES = {
    "e8m0": (finite.NAN_E8M0, torch.uint8, lambda t: t == 255),
    "e4m3": (finite.NAN_E4M3, torch.uint8, lambda t: (t & 127) == 127),
    "fp32": (finite.NAN_FP32, torch.float32, torch.isnan),
} | {
    str(dtype): (rule, dtype, lambda t: ~t.isfinite()) for dtype, rule in finite.NOT_FINITE.items()
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("_", ON_GPU)
def test_bad_values_of_every_kind_are_seen_wherever_they_stand_and_no_others(_, name):
    rule, dtype, is_bad = RULES[name]
    size = torch.empty(0, dtype=dtype).element_size()
    every = torch.arange(1 << (16 if size > 1 else 8), dtype=torch.int32)
    if size == 1:
        values = every.to(torch.uint8)
    elif size == 2:
        values = every.to(torch.int16).view(dtype)
    else:  # every sign, exponent and upper bits; and the neighbours of Inf
        values = torch.cat((every << 16, (every << 16) + 1)).view(dtype)
    fine = values[~is_bad(values)]
    fine = fine[: len(fine) // 4 * 4]
    wrong = values[is_bad(values)][[0, -1]]
    runs = fine.repeat(8, 1)
    at = [0, 1, len(fine) // 2 + 2, len(fine) - 1]
    for i, place in enumerate(at):
        runs[1 + i, place] = wrong[i % 2]
    flags, runs = finite.new_flags(8, DEV), runs.to(DEV)
    assert finite.is_readable(runs, 8)
    bad = [runs[i : i + 1] for i in (1, 5)]  # as biases
    finite.launch([finite.Look(runs, rule, 1), finite.Look(bad[0], rule, 2)], 8, flags)
    assert flags[:19].tolist() == [1] + 8 * [0] + [0, 1, 1, 1, 1, 0, 0, 0] + [1, 0]
    flags.zero_()
    finite.launch([finite.Look(runs[5:], rule, 0), finite.Look(bad[1], rule, 3)], 3, flags)
    assert not flags.any()


def experts():
    """MXFP4 [n, 2, 32, 2272] of which each differs from the first in what its name says."""
    rng = torch.Generator().manual_seed(0)
    w = mm.ExpertWeights.quantize(
        torch.randn(1, 64, 2272, generator=rng), torch.randn(1, 2272, 32, generator=rng), "w4a16"
    ).w13

    def another(place, code, *more, is_zero=False):
        data, scale = w.data.clone(), w.scale.clone()
        scale[(0, *place)] = code
        for other, its in more:
            scale[(0, *other)] = its
        if is_zero:
            data[0, place[0], place[1], place[2] * 16 : place[2] * 16 + 16] &= 0x88
        return replace(w, data=data, scale=scale)

    all_zero = replace(w, data=w.data & 0x88, scale=w.scale.clone())
    all_zero.scale[0, 1, 2] = torch.arange(71) * 3
    return [
        w, another((0, 3, 70), 100), another((1, 31, 0), 0), another((0, 0, 2), 140),
        another((1, 2, 66), 255), another((0, 5, 5), 0, is_zero=True),
        another((1, 5, 5), 254, is_zero=True), another((0, 5, 65), 255, is_zero=True),
        another((0, 9, 0), 0, ((1, 9, 69), 200)), another((0, 1, 0), 115, ((0, 1, 1), 126)),
        another((0, 1, 0), 115, ((0, 1, 1), 127)), all_zero,
    ]  # fmt: skip


@pytest.mark.parametrize("_", ON_GPU)
def test_facts_of_experts_are_those_of_torch(_):
    each = experts()
    data, scale = (torch.cat([getattr(w, n) for w in each]) for n in ("data", "scale"))
    both = Quantized(data, scale, "mxfp4", (len(each), *each[0].shape[1:])).to(DEV)
    found = []
    for forbidden in (0, finite.BAD):
        flags = finite.new_flags(len(each), DEV)
        pair, num = facts_on_gpu.pair_of(facts_on_gpu.by_gate(both), flags)
        facts_on_gpu.launch(pair, num, flags, forbidden)
        assert bool(flags[0]) == bool(forbidden) and not flags[1 + num :].any()
        found = flags[1 : 1 + num].tolist()
    assert not found[0]
    for w, flag in zip(each, found, strict=True):
        is_nan = bool((w.scale == 255).any())
        assert bool(flag & finite.BAD) == is_nan
        assert is_nan or facts_on_gpu.facts_of_flag(flag) == pack.facts_of(w)
    assert len(set(found)) > 5


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_they_compile_for_hopper_and_read_16_bytes_at_a_time():
    u8, i32, bf16 = map(Stand, (torch.uint8, torch.int32, torch.bfloat16))
    words = tuple(finite.Words(i32, num) for num in (1 << 22, 1 << 10))
    rules = tuple(map(tuple, (finite.NAN_E4M3, finite.NAN_FP32)))
    made = compile_kernel(
        finite._bad_words_kernel, (words, i32, 32), 90, RULES=rules, OWNERS=(0, 0),
        WORDS=finite.WORDS, num_warps=finite.WARPS,
    )  # fmt: skip
    ptx = made.asm["ptx"]
    assert resources(made)["stack"] == 0 and "ld.global.b32" not in ptx
    assert ptx.count("ld.global.v4.b32") == 2 * finite.WORDS // finite.WARPS // 32 // 4
    for source, acts in ((i32, None), (bf16, CODES["mxfp4"])):
        pair = tuple(
            facts_on_gpu.Matrix(source, u8, i32, 4096, *sizes)
            for sizes in ((2048, 512, 128), (4096, 256, 64))
        )
        rows = facts_on_gpu.ROWS if acts is None else facts_on_gpu.FLOAT_ROWS
        cols = facts_on_gpu.GROUPS if acts is None else facts_on_gpu.FLOAT_COLS
        made = compile_kernel(
            facts_on_gpu._facts_kernel, (pair, i32, 32, 3), 90, GATED=(True, False),
            INTERLEAVED=False, POWERS=True, ACTS=acts, ROWS=rows, COLS=cols,
            num_warps=facts_on_gpu.WARPS,
        )  # fmt: skip
        assert resources(made)["stack"] == 0 and resources(made)["registers"] <= 64
        assert made.asm["ptx"].count("ld.global.v4.b32") >= 4
