"""On a GPU the oracle, the weights and the routing give the bits they give on the CPU."""

import pytest
import torch

import megamoe as mm
from megamoe.bench import job
from megamoe.bench.quantizing import measure
from megamoe.bench.workloads import MODELS
from megamoe.engine.backends import arch_of
from megamoe.formats.spec import recipe_named
from megamoe.problem import RECIPES
from megamoe.routing.permute import permute
from megamoe.routing.samplers import sample_routing

pytestmark = pytest.mark.gpu

E, I, H, K = 8, 352, 480, 3
OPTIONS = [
    {},
    {"clamp": 1.0, "weight_at": "combine"},
    {"activation": "gpt_oss", "combine": "fp8"},
]


def source(seed=0):
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(E, 2 * I, H, generator=rng) / H**0.5
    w2 = torch.randn(E, H, I, generator=rng) / I**0.5
    return w13.bfloat16(), w2.bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_quantised_on_a_gpu_have_the_cpus_bytes(recipe):
    w13, w2 = source()
    cpu = mm.ExpertWeights.quantize(w13, w2, recipe).state_dict()
    gpu = mm.ExpertWeights.quantize(w13.cuda(), w2.cuda(), recipe).to("cpu").state_dict()
    assert cpu.keys() == gpu.keys()
    for name, t in cpu.items():
        assert torch.equal(t.reshape(-1).view(torch.uint8), gpu[name].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_layer_on_a_gpu_has_the_cpus_bits(recipe, options):
    rng = torch.Generator().manual_seed(1)
    bias = {"b13": torch.randn(E, 2 * I, generator=rng), "b2": torch.randn(E, H, generator=rng)}
    weights = mm.ExpertWeights.quantize(*source(), recipe, **bias)
    x = torch.randn(65, H, generator=rng).bfloat16()
    idx, weight = sample_routing(65, E, K, skew="zipf", masked_ratio=0.1)
    cpu = mm.moe(x, idx, weight, weights, shared=weights[:1], **options)
    there = weights.to("cuda")
    gpu = mm.moe(
        x.cuda(), idx.cuda(), weight.cuda(), there, shared=there[:1], backend="reference", **options
    )
    assert torch.equal(cpu, gpu.cpu())
    q = mm.quantize(x.cuda(), recipe_named(recipe).acts.name)
    again = mm.moe(
        q, idx.cuda(), weight.cuda(), there, shared=there[:1], backend="reference", **options
    )
    assert torch.equal(gpu, again)


def test_tf32_does_not_reach_the_oracle():
    weights = mm.ExpertWeights.quantize(*source(), "bf16").to("cuda")
    x = torch.randn(33, H, device="cuda").bfloat16()
    idx, weight = (t.cuda() for t in sample_routing(33, E, K))
    wanted = mm.moe(x, idx, weight, weights, backend="reference")
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(mm.moe(x, idx, weight, weights, backend="reference"), wanted)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_module_moves_and_counts():
    layer = mm.MoE(mm.ExpertWeights.quantize(*source(), "nvfp4"), E, K).half().cuda()
    idx, weight = (t.cuda() for t in sample_routing(9, E, K))
    layer(torch.randn(9, H, device="cuda").bfloat16(), idx, weight)
    assert layer.stats.is_cuda and int(layer.stats.sum()) == 27
    with pytest.raises(mm.MegaMoEError, match="got cpu"):
        layer(torch.randn(9, H).bfloat16(), idx, weight)


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b"])
def test_routing_and_order_agree_with_the_cpu(name):
    router = MODELS[name].router
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(500, router.num_experts, generator=rng)
    bias = torch.randn(router.num_experts, generator=rng) / 8
    idx, weight = mm.route(logits, router, bias)
    gpu_idx, gpu_weight = mm.route(logits.cuda(), router, bias.cuda())
    assert torch.equal(idx, gpu_idx.cpu())
    assert torch.allclose(weight, gpu_weight.cpu(), rtol=1e-6)
    for a, b in zip(
        permute(idx, router.num_experts, 16), permute(gpu_idx, router.num_experts, 16), strict=True
    ):
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "gpt-oss-120b", "deepseek-v3"])
def test_the_job_runs_at_full_size(name):
    result = job.run(MODELS[name], num_tokens=64, num_ranks=2, device="cuda")
    print(name, result)
    assert result.ok and result.scale == 1.0
    assert result.recipe == MODELS[name].recipe_on(arch_of(torch.device("cuda")))


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8", "nvfp4"])
def test_quantising_a_whole_layer_needs_little_memory(recipe):
    row = measure(MODELS["deepseek-v4-flash"], recipe, None, "cuda", lambda *step: None)
    print(row)
    assert row.num_experts == 256 and row.extra_of_expert < 1.5
