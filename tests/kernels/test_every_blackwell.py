"""`scripts/compile_blackwell.py` leaves out nothing that a plan takes, and sees what is wrong."""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from megamoe.engine.recording import recorded, target_of
from megamoe.errors import MegaMoEError
from megamoe.hardware import B200
from megamoe.planner.grouped import VARIANTS, GroupedSpec, plan_grouped
from megamoe.planner.launches import GemmTmem, Mega
from megamoe.planner.numerics import BLACKWELL_RECIPES
from megamoe.planner.plan import plan
from megamoe.problem import Problem
from tests.kernels.blackwell import launch_grouped
from tests.kernels.compiling import code_of
from tests.kernels.support import INTERPRETED

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import compile_blackwell as script

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")


def tiles_of(found):
    """(launch, tile) of a plan; in a chain GEMMs follow tiles and are other kernels."""
    is_chained = found.is_chained
    for launch in found.launches:
        if isinstance(launch.config, GemmTmem):
            yield f"chain {launch.name}" if is_chained else launch.name, launch.config
        elif isinstance(launch.config, Mega):
            yield launch.name, launch.config.tile


@pytest.fixture(scope="module")
def compiled():
    """Tiles that the script compiles, by recipe and kind of launch."""
    found = set()
    for _, layer, tokens in script.layers():
        for num in tokens:
            try:
                made = layer.plan(num)
            except MegaMoEError:
                continue
            found |= {(layer.recipe, *one) for one in tiles_of(made)}
    with recorded(target_of(B200)):
        for recipe, variant, rows, n, order in script.grouped_calls():
            try:
                made = launch_grouped(recipe, variant, rows, n, **order)
            except MegaMoEError:
                continue
            found.add((recipe, variant, made.gemm.config))
    return found


def test_plans_of_random_layers_take_no_other_tile(compiled):
    rng, taken = random.Random(0), set()
    for _ in range(6000):
        ranks = rng.choice((1, 1, 1, 2, 4, 8))
        num_experts = ranks * rng.choice((1, 3, 8, 16, 32, 60, 128, 256, 384))
        top_k = rng.randint(1, min(num_experts, 10))
        widths = (32 * rng.randint(1, 250) for _ in range(2))
        tokens, recipe = int(2 ** rng.uniform(0, 14)), rng.choice(BLACKWELL_RECIPES)
        problem = Problem(tokens, *widths, num_experts, top_k, ranks, recipe)
        mode = rng.choice(("staged", "fused", "chain"))
        try:
            made = plan(problem, "b200", backend="blackwell", mode=mode)
        except MegaMoEError:
            continue
        some = {(recipe, *one) for one in tiles_of(made)}
        assert some <= compiled, (problem, mode)
        taken |= some
    assert len({one[0] for one in taken}) == len(BLACKWELL_RECIPES)
    staged = {one for one in compiled if one[1] in ("l1", "l2")}
    assert staged <= taken  # and nothing is compiled that no plan takes


def test_plans_of_random_grouped_gemms_take_no_other_tile(compiled):
    rng, taken = random.Random(1), set()
    for _ in range(4000):
        recipe, variant = rng.choice(BLACKWELL_RECIPES), rng.choice(tuple(VARIANTS))
        groups = rng.randint(1, 64)
        rows, n = int(2 ** rng.uniform(0, 15)), 32 * rng.randint(1, 300)
        spec = GroupedSpec(recipe, rows, groups, n, 32 * rng.randint(1, 250), variant)
        try:
            made = plan_grouped(spec, "b200", backend="blackwell")
        except MegaMoEError:
            assert (recipe, variant) == ("w4a16", "gather")
            continue
        taken.add((recipe, variant, made.gemm.config))
    assert taken <= compiled


@pytest.fixture(scope="module")
def one():
    """A configuration of the staged GEMM, compiled."""
    found = script.configurations(only=r"^staged w4a8 tiny, 8 tokens")
    key, one = next((k, f) for k, f in found.items() if f.kernel == "gemm_tmem_kernel")
    return key, one, script.compiled(one, 100)


def test_what_is_assembled_for_sm_103a_is_what_triton_makes_there(one):
    _, found, first = one
    ptx = script.retargeted(first.asm["ptx"], 103)
    second = script.assembled(found, ptx, first, 103)
    whole = script.compiled(found, 103)
    assert script.without_names(whole.asm["ptx"]) == script.without_names(ptx)
    assert code_of(second) == code_of(whole)
    assert not script.wrong_with(found, second, 103) and not script.wrong_with(found, first, 100)


@pytest.mark.parametrize(("change", "word"), [
    (lambda ptx: ptx.replace("tcgen05.mma.cta_group::1", "tcgen05.mma.cta_group::2", 1), "M=128"),
    (lambda ptx: ptx.replace("target sm_100a", "target sm_90a"), "another target"),
])  # fmt: skip
def test_a_wrong_descriptor_and_a_wrong_target_are_seen(one, change, word):
    _, found, first = one
    changed = replace_ptx(first, change(first.asm["ptx"]))
    assert any(word in text for text in script.wrong_with(found, changed, 100))


def test_no_launch_reduces_fp32_in_a_warp_of_which_triton_3_6_dies_for_sm_103a():
    """LLVM ERROR: Cannot select redux.sync.fmax, which ends the process: NVFP4's division did."""
    found = script.configurations(only=r"^staged nvfp4 deepseek-v4-flash, 8 tokens")
    pool = next(one for one in found.values() if one.kernel == "_pool_kernel")
    made = script.compiled(pool, 100)
    assert "redux.sync.max.s32" in made.asm["ptx"] and not script.wrong_with(pool, made, 100)
    other = replace_ptx(made, made.asm["ptx"].replace("redux.sync.max.s32", "redux.sync.max.f32"))
    wrong = script.wrong_with(pool, other, 100)
    assert ["a warp's reduction of FP32" in text for text in wrong] == [True]
    assert ".target sm_103a" in script.compiled(pool, 103).asm["ptx"]


def test_the_page_has_the_number_of_configurations_by_kernel():
    found = Counter(one.kernel for one in script.configurations().values())
    page = (Path(__file__).parents[2] / "docs" / "blackwell.md").read_text()
    gemm, fused = found["gemm_tmem_kernel"], found["mega_tmem_kernel"]
    rest = found.total() - gemm - fused
    for text in (f"{found.total()} of them at 3.6", f"grouped GEMM | {gemm} |",
                 f"fused launch | {fused} |", f"combine | {rest} |"):  # fmt: skip
        assert text in page, text


# (a configuration, what is changed of its PTX, what is said of it)
OTHER_FORMATS = (
    ("w4a8 gather", r"\.kind::\S+", ".kind::f16", "MMAs"),
    ("w4a8 gather", r"tcgen05\.cp\.", "tcgen05.x.", "no copies of scales"),
    ("w4a8 gather", r"cp\.async\.bulk\.tensor\.2d", "cp.async.bulk.2d", "no cp.async.bulk.tensor"),
    ("w4a8 gather", "tile::gather4", "tile", "gather4 missing"),
    ("w8a8 gemm", r"\Z", "// tile::gather4", "gather4"),
    ("w8a8 gemm", r"\A", "// tcgen05.cp.cta_group::1.warpx4.32x128b\n", "copies of scales"),
)  # fmt: skip


def test_instructions_of_another_format_are_seen():
    """Each configuration has its own: the kind of MMA, copies of scales, TMA, gather4."""
    made = {}
    for name in dict.fromkeys(row[0] for row in OTHER_FORMATS):
        found = script.configurations(only=rf"^grouped {name} \d+ 256 static")
        one = next(one for one in found.values() if one.kernel == "gemm_tmem_kernel")
        made[name] = one, script.compiled(one, 100)
        assert not script.wrong_with(*made[name], 100)
    for name, old, new, word in OTHER_FORMATS:
        one, right = made[name]
        other = replace_ptx(right, re.sub(old, new, right.asm["ptx"]))
        assert any(word in text for text in script.wrong_with(one, other, 100)), (name, word)


@pytest.mark.parametrize(("env", "code"), [
    pytest.param({}, 0, id="here", marks=pytest.mark.every),
    pytest.param({"CI": "true"}, 1, id="ci"),
])  # fmt: skip
def test_a_newer_triton_that_is_not_there_fails_in_ci_alone(env, code):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["bash", "scripts/newer_triton.sh", "0.0.1"], cwd=root, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PIP_NO_INDEX": "1", **env},
    )  # fmt: skip
    assert "NOTHING was compiled" in done.stderr and done.returncode == code


def test_stack_and_memory_beyond_a_cta_are_seen(one, monkeypatch):
    _, found, first = one
    monkeypatch.setattr(script, "resources", lambda made: {"stack": 8})
    most = SimpleNamespace(shared=1 << 20, tmem_size=1024)
    wrong = script.wrong_with(found, first._replace(metadata=most), 100)
    assert [text.split()[0] for text in wrong] == ["8", "1048576", "1024"]


def replace_ptx(made, ptx):
    return made._replace(asm={**made.asm, "ptx": ptx})
