"""What kernels say of values that are to be written: the same as torch says."""

from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe.formats.quantized import Quantized
from megamoe.kernels.common import finite
from megamoe.kernels.hopper.weights import facts_on_gpu, pack
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
    flags = torch.zeros(10, dtype=torch.int32, device=DEV)
    assert finite.is_readable(runs, 8)
    finite.launch(runs.to(DEV), 8, rule, flags, 1)
    assert flags.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]


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
    flags = torch.zeros(len(each) + 2, dtype=torch.int32, device=DEV)
    facts_on_gpu.launch(both, flags, 1)
    found = flags.tolist()
    assert found[0] == found[-1] == 0 and not found[1]
    for w, flag in zip(each, found[1:-1], strict=True):
        is_nan = bool((w.scale == 255).any())
        assert bool(flag & finite.BAD) == is_nan
        assert is_nan or facts_on_gpu.facts_of_flag(flag) == pack.facts_of(w)
    assert len(set(found)) > 5


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_they_compile_for_hopper_and_read_16_bytes_at_a_time():
    u8, i32 = map(Stand, (torch.uint8, torch.int32))
    for rule in (finite.NAN_E8M0, finite.NAN_E4M3, finite.NAN_FP32):
        made = compile_kernel(
            finite._bad_words_kernel, (i32, i32, 0, 1 << 22), 90, BITS=rule.bits, ONE=rule.one,
            CARRY=rule.carry, OWN=rule.is_own, WORDS=finite.WORDS, num_warps=finite.WARPS,
        )  # fmt: skip
        ptx = made.asm["ptx"]
        assert resources(made)["stack"] == 0 and "ld.global.b32" not in ptx
        assert ptx.count("ld.global.v4.b32") == finite.WORDS // finite.WARPS // 32 // 4
    for groups in (128, 64):
        made = compile_kernel(
            facts_on_gpu._facts_kernel, (i32, u8, i32, 0, 4096, groups), 90,
            ROWS=facts_on_gpu.ROWS, GROUPS=facts_on_gpu.GROUPS, num_warps=facts_on_gpu.WARPS,
        )  # fmt: skip
        assert resources(made)["stack"] == 0
