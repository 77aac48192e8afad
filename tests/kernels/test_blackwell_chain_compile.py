"""Chains compile for sm_100a and sm_103a: no stack, legal descriptors, wide stores."""

import re

import pytest
import torch

from megamoe.engine import blackwell, chain
from megamoe.engine.call import Call
from megamoe.engine.planning import Ranks, Traits, plan_for
from megamoe.engine.status import DeviceStatus
from megamoe.kernels.blackwell import launch
from megamoe.kernels.gluon import exchange, permute, pull
from megamoe.kernels.portable import combine, sort
from megamoe.planner import chain as planned
from megamoe.planner.blackwell import shipped
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.planner.overrides import checked
from megamoe.problem import Options
from tests.kernels.compiling import compile_kernel, resources
from tests.kernels.support import INTERPRETED
from tests.kernels.test_blackwell_compile import assert_is_as_planned
from tests.kernels.test_chain_compile import Ignored, accesses
from tests.plan.support import META, experts
from tests.pretending import pretend_b200

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

H, K, LOCAL, R = 4096, 6, 32, 8
GEMM = (launch, "gemm_tmem_kernel")
BETWEEN = ((exchange, "_quantize_kernel"), (exchange, "exchange_kernel"), (pull, "_rows_kernel"),
           (pull, "pull_kernel"), (exchange, "finish_kernel"))  # fmt: skip
OTHERS = ((permute, "_count_kernel"), (permute, "_place_kernel"), (sort, "_scan_kernel"),
          (combine, "_combine_kernel"))  # fmt: skip


RELEASED = r"\b(?:atom|red)\.\S*release\S*\.add\S*"  # L1 counts its tiles


class Compiler:
    """Stands for a kernel, and compiles what it is launched with."""

    def __init__(self, kernel, arch, made):
        self.kernel, self.arch, self.made = kernel, arch, made

    def __getitem__(self, grid):
        def compile_it(*args, **given):
            self.made.append(compile_kernel(self.kernel, args, self.arch, **given))

        return compile_it


def compiled(monkeypatch, recipe, wanted, arch=100, num=512, **given):
    """(the plan, the kernels `wanted` of a call as `chain.run` launches them, by name)."""
    pretend_b200(monkeypatch)
    monkeypatch.setattr(
        blackwell, "known", lambda w, what, find, *_: what == "fits_bf16" or find(w)
    )
    found = {}
    for module, name in (*BETWEEN, GEMM):
        made = found[name] = []
        stand = Compiler(getattr(module, name), arch, made) if name in wanted else Ignored()
        monkeypatch.setattr(module, name, stand)
    for module, name in OTHERS:
        monkeypatch.setattr(module, name, Ignored())
    w = experts(recipe, LOCAL)
    plan = plan_for(
        w, Options(), Traits(), num_tokens=num, top_k=K,
        overrides=checked({"backend": "blackwell", "mode": "chain", **given}),
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
    call = Call(x, idx, torch.empty(num, K, device=META), w, Options(), None, status, stats)
    chain.run(me, call, plan)
    return plan, found


# Of each recipe the widest tile, which has most registers and scratch; nvfp4's epilogue waits too.
TILES = [(recipe, tile.block_m) for recipe in BLACKWELL_RECIPES for tile in shipped(recipe)]
SOME = {("nvfp4", 128), ("w4a16", 64)}


@pytest.mark.parametrize(("recipe", "block_m"), [
    pytest.param(*one, id=f"{one[0]}-{one[1]}", marks=() if one in SOME else (pytest.mark.every,))
    for one in dict.fromkeys(TILES)
])  # fmt: skip
def test_gemms_that_follow_tiles_compile_without_stack_and_write_rows_home_wide(
    recipe, block_m, monkeypatch
):
    plan, found = compiled(monkeypatch, recipe, (GEMM[1],), block_m=block_m)
    l1, l2 = found[GEMM[1]]
    for made in (l1, l2):
        assert_is_as_planned(recipe, plan.tile, made)
        ptx = made.asm["ptx"]
        assert ptx.count("ld.acquire.gpu.global") >= 1  # waits for tiles
        assert ptx.count("red.relaxed.gpu.global.min.s32") >= 1  # and their reports
    assert len(re.findall(RELEASED, l1.asm["ptx"])) == 1
    assert not re.findall(RELEASED, l2.asm["ptx"])
    assert {size for size in accesses(l2, "st") if size < 16} == set()


@pytest.mark.every
@pytest.mark.parametrize("recipe", ["w4a8", "w4a16", "nvfp4"])
def test_tiles_that_are_drawn_follow_too(recipe, monkeypatch):
    plan, found = compiled(monkeypatch, recipe, (GEMM[1],), schedule="dynamic")
    for made in found[GEMM[1]]:
        assert_is_as_planned(recipe, plan.tile, made)


@pytest.mark.every
@pytest.mark.parametrize("recipe", BLACKWELL_RECIPES)
def test_sm_103a_has_them_without_stack_too(recipe, monkeypatch):
    plan, found = compiled(monkeypatch, recipe, (GEMM[1],), arch=103)
    for made in found[GEMM[1]]:
        assert ".target sm_103a" in made.asm["ptx"] and resources(made)["stack"] == 0
        assert_is_as_planned(recipe, plan.tile, made)


@pytest.mark.parametrize(
    ("recipe", "arch"),
    [
        ("nvfp4", 100),
        *(
            pytest.param(recipe, arch, marks=pytest.mark.every)
            for recipe in BLACKWELL_RECIPES
            for arch in (100, 103)
            if (recipe, arch) != ("nvfp4", 100)
        ),
    ],
)
def test_what_goes_between_ranks_compiles_without_stack_and_sixteen_bytes_wide(
    recipe, arch, monkeypatch
):
    names = [name for _, name in BETWEEN]
    _, found = compiled(monkeypatch, recipe, names, arch)
    for name in names:
        (made,) = found[name]
        assert resources(made)["stack"] == 0, name
    (pulled,) = found["pull_kernel"]
    loads = accesses(pulled, "ld")
    assert loads.count(16) >= 4  # records; tiles and where records lie are this rank's
    (pushed,) = found["exchange_kernel"]
    assert pushed.asm["ptx"].count("st.release.sys") == 1
    sizes = accesses(pushed, "st")
    assert set(sizes) == {4, 16} and sizes.count(4) == 1
