"""The chain's launches compile for sm_90a; what crosses between ranks is 16 bytes wide."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from megamoe.engine import chain, images, packed
from megamoe.engine.call import Call
from megamoe.engine.planning import Ranks, Traits, plan_for
from megamoe.engine.status import DeviceStatus
from megamoe.kernels.gluon import exchange, permute, pull
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.gemm import fp8_rows
from megamoe.kernels.hopper.weights import pack
from megamoe.kernels.portable import combine, sort
from megamoe.planner import chain as planned
from megamoe.planner.hopper import shared_memory
from megamoe.planner.overrides import checked
from megamoe.problem import Options
from tests.kernels.compiling import resources
from tests.kernels.support import INTERPRETED
from tests.kernels.test_hopper_compile import META, SHARED_LIMIT, Compiler
from tests.plan import support
from tests.plan.support import experts
from tests.pretending import pretend_h200

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

H, K, LOCAL, R = 4096, 6, 32, 8
HOST = ((exchange, "_quantize_kernel"), (exchange, "exchange_kernel"), (exchange, "finish_kernel"),
        (pull, "_rows_kernel"), (pull, "pull_kernel"), (launch, "gemm_kernel"),
        (launch, "gemm_swap_ab_kernel"), (fp8_rows, "scales_kernel"))  # fmt: skip
OTHERS = ((permute, "_count_kernel"), (permute, "_place_kernel"), (sort, "_scan_kernel"),
          (combine, "_combine_kernel"))  # fmt: skip


class Ignored:
    """Launches that are compiled elsewhere."""

    def __getitem__(self, grid):
        return lambda *args, **constants: None


def compiled(monkeypatch, recipe, num, wanted, links=None, **given):
    """The kernels `wanted` of a call, compiled as `chain.run` launches them: by name, in order.

    Under "sums": the plan's sum of shared memory of each linear, in passes one after the other.
    """
    pretend_h200(monkeypatch)
    found = {}
    for module, name in HOST:
        made = found[name] = []
        is_wanted = name in wanted
        stand = Compiler(getattr(module, name), made) if is_wanted else Ignored()
        monkeypatch.setattr(module, name, stand)
    for module, name in OTHERS:
        monkeypatch.setattr(module, name, Ignored())
    facts = pack.Facts(True, True, True)
    monkeypatch.setattr(pack, "facts_of", lambda w: facts)
    monkeypatch.setattr(packed, "facts_of", lambda w: facts)
    monkeypatch.setattr(images, "_facts", lambda w: facts)
    w = experts(recipe)
    if given.pop("has_bias", False):
        b13 = torch.empty(LOCAL, 2, w.intermediate, device=META)
        b2 = torch.empty(LOCAL, w.hidden, device=META)
        w = replace(w, b13=b13, b2=b2)
    options = Options(combine=given.pop("combine", "bf16"))
    plan = plan_for(
        w, options, Traits(), num_tokens=num, top_k=K,
        overrides=checked({"backend": "hopper", "mode": "chain", **given}),
        ranks=Ranks(R, R * LOCAL, max_tokens=num),
    )  # fmt: skip
    where = planned.memory(plan.call, plan.backend)
    memory = torch.empty(where.num_bytes, dtype=torch.uint8, device=META)
    peers = torch.empty(R, dtype=torch.int64, device=META)
    me = chain.Member(chain.buffer_in(memory, where), peers, 3, R)
    status = DeviceStatus.around(torch.empty(4352, dtype=torch.int32, device=META))
    x = torch.empty(num, H, dtype=torch.bfloat16, device=META)
    idx = torch.empty(num, K, dtype=torch.int64, device=META)
    stats = torch.empty(LOCAL, dtype=torch.int64, device=META)
    call = Call(x, idx, torch.empty(num, K, device=META), w, options, None, status, stats)
    chain.run(me, call, plan, links)
    found["sums"] = sums_of(plan)
    return found


def sums_of(plan):
    """The plan's sum of shared memory of every launch of a routed linear, L1s first."""
    names = ("l1", "l2")
    gemms = [one for name in names for one in plan.launches if one.name == name]
    return [shared_memory(plan.call, one.config) for one in gemms]


def accesses(kernel, what):
    """(bytes of a vector) of each load or store to global memory that is not volatile or atomic."""
    ptx = kernel.asm["ptx"]
    plain = rf"\b{what}\.global(?:\.L\S+)?(?:\.(v[24]))?\.b(\d+)"
    return [int((v or "v1")[1:]) * int(bits) // 8 for v, bits in re.findall(plain, ptx)]


def test_the_exchange_pushes_sixteen_bytes_at_a_time_behind_one_fence(monkeypatch):
    found = compiled(monkeypatch, "w8a8", 512, ("exchange_kernel", "finish_kernel"))
    for name in ("exchange_kernel", "finish_kernel"):
        (made,) = found[name]
        ptx = made.asm["ptx"]
        assert ptx.count("st.release.sys") == 1
        assert ptx.count("fence.acq_rel.sys") + ptx.count("fence.sc.sys") == 0
        assert "atom.global.sys" not in ptx and "red.global.sys" not in ptx
    pushed = accesses(found["exchange_kernel"][0], "st")
    assert set(pushed) == {4, 16} and pushed.count(4) == 1  # the call's bound, beside its number


# Recipe, hidden, links; loads of a row's data and of its scales by a thread, 16 bytes each.
PULLS = {
    "fp8": ("w8a8", 4096, None, (4, 1)),
    "paced": ("w8a8", 4096, chain.Links(1e11), (4, 1)),
    "factor": ("nvfp4", 4096, None, (8, 1)),
    "wide-fp8": ("w8a8", 7168, None, (8, 1)),
    "wide-bf16": ("bf16", 7168, None, (16, 0)),
    "wide-factor-paced": ("nvfp4", 7168, chain.Links(1e11), (16, 1)),
    "wider-than-registers": ("bf16", 12288, None, (16, 0)),
}
OTHER_WIDTHS = {"wide-fp8": pytest.mark.every, "factor": pytest.mark.every}


@pytest.mark.parametrize("case", [pytest.param(c, marks=OTHER_WIDTHS.get(c, ())) for c in PULLS])
def test_tokens_are_pulled_sixteen_bytes_at_a_time_in_one_trip(case, monkeypatch):
    recipe, hidden, links, (num_data, num_scales) = PULLS[case]
    for module in (sys.modules[__name__], support):
        monkeypatch.setattr(module, "H", hidden)
    (made,) = compiled(monkeypatch, recipe, 512, ("pull_kernel",), links)["pull_kernel"]
    assert resources(made)["stack"] == 0
    # Tiles, and where each row's record lies, are this rank's; all that is left is records.
    loads = accesses(made, "ld")
    assert [size for size in loads if size < 16] == [4, 4, 4, 8, 4, 4, 8]
    # What the group after this one is, lies between the loads of records and their stores.
    steps = [(what, int((v or "v1")[1:]) * int(bits) // 8) for what, v, bits in
             re.findall(r"\b(ld|st)\.global(?:\.(v[24]))?\.b(\d+)", made.asm["ptx"])]  # fmt: skip
    wanted = [("ld", 16)] * (num_data + num_scales) + [("ld", 4), ("ld", 4), ("ld", 8)]
    wanted += [("st", 16)] * num_data
    assert steps[steps.index(("ld", 16)) :][: len(wanted)] == wanted


# Kernel, recipe, tokens a rank, overrides: every kind of GEMM that follows tiles.
GEMMS = {
    "swap_ab": ("w4a8_block", 64, {}),
    "swap_ab-bf16": ("bf16", 512, {}),
    "swap_ab-nvfp4": ("nvfp4", 512, {}),
    "decoded-per-tile": ("w4a8_block", 512, {}),
    "decoded-per-wave": ("w4a8_block", 2048, {}),
    "dynamic": ("w8a8", 512, {}),
    "static": ("w8a8", 512, {"schedule": "static"}),
    "swap_ab-fp8-rows": ("w4a8_block", 64, {"combine": "fp8"}),
    "decoded-per-tile-fp8-rows": ("w4a8_block", 512, {"combine": "fp8"}),
    "decoded-per-wave-fp8-rows": ("w4a8_block", 2048, {"combine": "fp8"}),
    "dynamic-fp8-rows": ("w8a8", 512, {"combine": "fp8", "has_bias": True}),
}


# The GEMM and its epilogue are those of decoded-per-wave.
LEFT = {"decoded-per-tile-fp8-rows": pytest.mark.every}


@pytest.mark.parametrize("case", [pytest.param(c, marks=LEFT.get(c, ())) for c in GEMMS])
def test_gemms_that_follow_tiles_compile_without_spills_and_write_rows_home_wide(case, monkeypatch):
    recipe, num, given = GEMMS[case]
    found = compiled(monkeypatch, recipe, num, ("gemm_kernel", "gemm_swap_ab_kernel"), **given)
    l1, l2 = found["gemm_kernel"] + found["gemm_swap_ab_kernel"]
    for made, sums in zip((l1, l2), found["sums"], strict=True):
        used = resources(made)
        assert used["stack"] == 0 and used["shared"] <= sums.num_bytes <= SHARED_LIMIT
    narrow = [size for size in accesses(l2, "st") if size < 16]
    if "fp8-rows" in case:  # scales, which stay here until `scales_kernel` sends them
        assert narrow.count(1) >= 2
        narrow = [size for size in narrow if size > 1]
    assert len(narrow) <= 2 * ("dynamic" in case)  # the counter of items, which is this rank's


def test_scales_of_fp8_rows_go_home_sixteen_bytes_at_a_time(monkeypatch):
    (made,) = compiled(monkeypatch, "w8a8", 512, ("scales_kernel",), combine="fp8")["scales_kernel"]
    assert set(accesses(made, "st")) == {16} and resources(made)["stack"] == 0


@pytest.mark.parametrize("case", GEMMS)
def test_rows_and_records_compile_for_every_tile(case, monkeypatch):
    """With statistics, with and without work items."""
    recipe, num, given = GEMMS[case]
    found = compiled(monkeypatch, recipe, num, ("_rows_kernel", "_quantize_kernel"), **given)
    for name in ("_rows_kernel", "_quantize_kernel"):
        (made,) = found[name]
        assert resources(made)["stack"] == 0
