"""What `megamoe compile` makes is what a launch asks for: the same keys of Triton's disk cache."""

import json
from dataclasses import replace

import pytest
import torch
import triton

import megamoe as mm
from megamoe.engine import precompile
from megamoe.engine.call import Call
from megamoe.engine.functional import launch
from megamoe.engine.recording import LayerSpec, cubins_of, recorded, target_of
from megamoe.engine.refresh_on_gpu import OnGpu
from megamoe.engine.status import DeviceStatus
from megamoe.engine.symm_buffer import symm_buffer_in
from megamoe.errors import NotAvailable
from megamoe.kernels.common import finite
from megamoe.kernels.hopper.weights import facts_on_gpu, pack_on_gpu
from megamoe.kernels.portable.put import put
from megamoe.planner import copies
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

E, I, H, K = 8, 128, 256, 2
MACHINE = ("NVIDIA H200", 132, "sm_90a", 141 << 30)


def spec(recipe="w4a8_block", mode="auto", **more):
    overrides = (("backend", "hopper"), ("mode", mode))
    return LayerSpec(recipe, H, I, E, K, MACHINE, overrides=overrides, **more)


PACKING = ("_pack_experts_kernel", "_facts_kernel", "_bad_words_kernel")


def experts(recipe):
    rng = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * I, H, generator=rng)
    return mm.ExpertWeights.quantize(w13, torch.randn(E, H, I, generator=rng), recipe)


@pytest.mark.parametrize(("recipe", "mode"), [
    ("w4a8_block", "fused"), ("w4a8_block", "staged"), ("w8a8", "staged"), ("nvfp4", "staged"),
    ("w8a8", "split"),
])  # fmt: skip
@pytest.mark.parametrize("num", [1, 16, 77])
def test_a_launch_on_real_memory_asks_for_the_keys_that_are_found_without(recipe, mode, num):
    layer, w = spec(recipe, mode), experts(recipe)
    found = {one.hash for one in cubins_of(layer, [num])}
    x, idx = torch.zeros(num, H).bfloat16(), torch.zeros(num, K, dtype=torch.int64)
    stats, cpu = torch.zeros(E, dtype=torch.int64), torch.device("cpu")
    asked: set[str] = set()
    for ids in (idx, idx.int()):
        with recorded(target_of(layer.hardware)) as seen:
            rest = w, layer.options, None, DeviceStatus(cpu), stats
            launch(Call(x, ids, torch.ones(num, K), *rest), layer.plan(num))
        asked |= set(seen)
    with recorded(target_of(layer.hardware)) as seen:
        if w.is_packed:
            plain = w.w13.plain(), w.w2.plain()
            for matrix, one in zip((w.w13, w.w2), plain, strict=True):
                flags = finite.new_flags(E, torch.device("cpu"))
                if recipe != "nvfp4":
                    pair, _ = facts_on_gpu.pair_of(facts_on_gpu.by_gate(one), flags)
                    facts_on_gpu.launch(pair, E, flags, 0)
                pack_on_gpu.launch(matrix.packed, [3], one[4:5])
            for given in (plain, (plain[0], None), (None, plain[1])):
                flags = finite.new_flags(E, torch.device("cpu"))
                gpu = OnGpu(range(E), given, (w.w13, w.w2), (None, None), False, flags)
                gpu.look()
                gpu.write()
    assert asked | set(seen) == found and asked and bool(seen) == (recipe != "w8a8")


@pytest.mark.parametrize("num", [1, 7, 64])
def test_inputs_of_a_fused_call_over_ranks_are_put_by_a_launch_that_is_found(num):
    """Of either type of ids; in eight CTAs or sixty-four the same kernel."""
    layer = spec("w8a8", "fused", num_ranks=2, max_tokens=64)
    found = {one.hash for one in cubins_of(layer, [5]) if one.kernel == "_put_kernel"}
    where = layer.plan(5).exchange
    buffer = symm_buffer_in(torch.zeros(where.num_bytes, dtype=torch.uint8), where)
    asked: set[str] = set()
    for dtype in (torch.int64, torch.int32):
        x, idx = torch.zeros(num, H).bfloat16(), torch.zeros(num, K, dtype=dtype)
        into = buffer.tokens, buffer.topk_idx, buffer.topk_weights
        with recorded(target_of(layer.hardware)) as seen:
            step = copies.put(num, H, K, len(buffer.num_valid))
            put(x, idx, torch.ones(num, K), into, buffer.num_valid, step=step)
        asked |= set(seen)
    assert asked == found and len(asked) == 2


def test_a_compiled_kernel_is_found_under_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    (one,) = (c for c in cubins_of(spec("w8a8", "staged"), [8]) if c.kernel == "_combine_kernel")
    assert not one.is_there
    made = one.compile()
    assert made.hash == one.hash and one.is_there  # by triton.compile itself
    assert made.metadata.target.arch == 90 and made.asm["cubin"]
    (again,) = (c for c in cubins_of(spec("w8a8", "staged"), [8]) if c.kernel == "_combine_kernel")
    assert again.is_there


def test_other_sizes_images_and_ways_are_other_kernels():
    def hashes(*sizes, **more):
        made = cubins_of(spec(**more), sizes)
        return {one.hash for one in made if one.kernel not in PACKING}

    assert hashes(1, 64) == hashes(1) | hashes(64)
    assert hashes(64, recipe="w4a16") != hashes(64, recipe="w4a16", can_be_placed=False)
    assert hashes(64) < hashes(64, graphs=True)  # beside calls that are not replayed
    over = hashes(64, mode="fused", num_ranks=2, max_tokens=64)
    assert over and over.isdisjoint(hashes(64, mode="fused"))
    staged = cubins_of(spec(mode="staged", num_ranks=2, max_tokens=64), [64])
    assert {"gemm_swap_ab_kernel", "_combine_kernel"} <= {one.kernel for one in staged}


def test_calls_over_a_group_are_found_in_the_mode_of_their_bound():
    """As `GroupCalls.pick` plans them: a bucket of the bound, not the layer's largest call."""
    layer = spec("w8a8", num_ranks=2, max_tokens=4096)
    assert [layer.plan(num).mode for num in (3, 4096)] == ["fused", "chain"]
    assert [layer.plan(num).call.max_tokens for num in (3, 300)] == [4, 512]
    asked = {
        mode: replace(layer, overrides=(("mode", mode),)) for mode in ("chain", "fused", "split")
    }
    bounds = {
        mode: [one.plan(num).call.max_tokens for num in (3, 300)] for mode, one in asked.items()
    }
    assert bounds == {"chain": [4, 512], "split": [4, 512], "fused": [4096, 4096]}
    one_launch = replace(asked["fused"], max_tokens=40)  # as `auto` is where all sizes are fused
    assert [one_launch.plan(num).call.max_tokens for num in (3, 35)] == [4, 40]
    found = {one.kernel for one in cubins_of(layer, [4, 1000])}
    assert {"mega_kernel", "exchange_kernel", "pull_kernel", "gemm_kernel"} <= found
    parted = {one.kernel for one in cubins_of(asked["split"], [300])}
    assert {"exchange_kernel", "pull_kernel"} <= parted and "_pool_kernel" not in parted
    graphed = {one.kernel for one in cubins_of(replace(layer, graphs=True), [4])}
    assert {"_read_args_kernel", "_copy_inputs_kernel", "_copy_output_kernel"} <= graphed - found


def test_nothing_of_it_stays():
    from megamoe.kernels.hopper.mega.kernel import mega_kernel

    before = triton.runtime.driver._active, triton.compiler.compile, triton.JITFunction.run
    cubins_of(spec(mode="fused"), [4])
    after = triton.runtime.driver._active, triton.compiler.compile, triton.JITFunction.run
    assert after == before and mega_kernel.compile is triton.compiler.compile
    assert not mega_kernel.device_caches


def test_a_spec_travels_as_json():
    one = spec(num_ranks=2, graphs=True, shared=None)
    assert LayerSpec.from_dict(json.loads(json.dumps(one.as_dict()))) == one


class Worker:
    """A process that compiles nothing: the third kernel of four is there already."""

    made, fails = (), False

    def __init__(self, works):
        assert [tokens for _, tokens in works] == [[1]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self):
        return {"cubins": [{"kernel": "k", "hash": h, "is_there": h == "c"} for h in "abcd"]}

    def ask(self, one):
        if one == "b" and self.fails:
            raise NotAvailable("a compiling process must end its work; got ptxas")
        self.made.append(one)
        return {}


def test_processes_share_what_is_not_there_yet(monkeypatch):
    Worker.made, Worker.fails, steps = [], False, []
    monkeypatch.setattr(precompile, "_Worker", Worker)
    done = precompile.compile_layer(spec(), [1], processes=2, progress=lambda *at: steps.append(at))
    assert sorted(Worker.made) == ["a", "b", "d"] and (done.num, done.num_found) == (4, 1)
    assert steps[0] == (1, 4) and steps[-1] == (4, 4)
    Worker.fails = True
    with pytest.raises(NotAvailable, match="ptxas"):
        precompile.compile_layer(spec(), [1], processes=2)


def test_a_process_that_cannot_says_why():
    wrong = spec("w4a16", "fused", num_ranks=3)  # eight experts over three ranks
    with pytest.raises(NotAvailable, match="multiple of num_ranks"):
        precompile.compile_layer(wrong, [1], processes=1)
