"""SGLang's own classes with our hooks on a CPU. The suite does not collect it.

    pip download --no-deps sglang==0.5.23; unzip its wheel beside torch and what it imports
    python -m pytest -o addopts="" tests/integrations/sglang_sources.py

A server needs sgl-kernel and a GPU: here methods are made, loaded and called as FusedMoE does it.
"""

from types import SimpleNamespace

import pytest
import torch

import megamoe as mm
from megamoe.errors import NotAvailable
from megamoe.integrations import sglang as ours

E, K, H, I, T = 4, 2, 256, 128, 5


@pytest.fixture(scope="module", autouse=True)
def hooked():
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_flags

    ours.register()
    HookRegistry.apply_hooks()
    assert len([t for t in HookRegistry._patched if t.startswith(ours.AT)]) == 9
    flags, before = get_flags().moe, get_flags().moe.runner_backend
    flags.runner_backend = resolve_moe_runner_backend(ours.NAME)
    yield
    flags.runner_backend = before


def config(**changes):
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig

    sizes = {"num_experts": E, "num_local_experts": E, "hidden_size": H, "top_k": K,
             "intermediate_size_per_partition": I, "params_dtype": torch.bfloat16}  # fmt: skip
    return MoeRunnerConfig(**sizes | changes)


def dispatched(masked=False):
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    rng = torch.Generator().manual_seed(1)
    x = torch.randn(T, H, generator=rng).bfloat16()
    ids = torch.rand(T, E, generator=rng).topk(K).indices.int()
    if masked:
        ids[0, 1] = -1
    weights = torch.rand(T, K, generator=rng)
    return StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids, torch.zeros(T, E)))


def filled(method, weights, scale_name, **options):
    """A layer with the parameters that SGLang's method creates, filled with experts of ours."""
    layer = torch.nn.Module()
    layer.hidden_size, layer.intermediate_size_per_partition = H, I
    layer.moe_runner_config, layer.moe_tp_size, layer.moe_tp_rank = config(), 1, 0
    layer.num_local_experts = E
    method.create_weights(
        layer, E, H, I, params_dtype=torch.bfloat16, weight_loader=lambda *args: None, **options
    )
    for name, w in (("w13", weights.w13), ("w2", weights.w2)):
        data = w.data.flatten(1, 2) if name == "w13" else w.data
        parameter = getattr(layer, f"{name}_weight")
        assert parameter.shape == data.shape
        parameter.data.copy_(data.view(parameter.dtype))
        if w.scale is not None:
            scale = w.scale.flatten(1, 2) if name == "w13" else w.scale
            getattr(layer, f"{name}_{scale_name}").data.copy_(scale)
    return layer


def methods():
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    block = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
    return {
        "bf16": (lambda: UnquantizedFusedMoEMethod(), ""),
        "w8a8": (lambda: Fp8MoEMethod(block), "weight_scale_inv"),
        "w4a16": (lambda: Mxfp4MoEMethod("experts"), "weight_scale"),
    }


@pytest.mark.parametrize("recipe", ["bf16", "w8a8", "w4a16"])
def test_sglangs_methods_give_the_oracles_bits(recipe, monkeypatch):
    from sglang.srt.layers.quantization import mxfp4

    # Of a server's arguments, which there are none of here.
    moe = SimpleNamespace(flashinfer_mxfp4_moe_precision="bf16")
    monkeypatch.setattr(mxfp4, "get_exec", lambda: SimpleNamespace(moe=moe))
    make, scale_name = methods()[recipe]
    rng = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(s, generator=rng) / 16 for s in ((E, 2 * I, H), (E, H, I)))
    weights = mm.ExpertWeights.quantize(w13, w2, recipe)
    method = make()
    layer = filled(method, weights, scale_name)
    method.create_moe_runner(layer, config(routed_scaling_factor=2.5, swiglu_limit=10.0))
    method.process_weights_after_loading(layer)
    given = dispatched(masked=True)
    y = method.apply(layer, given).hidden_states
    routed = given.topk_output
    wanted = mm.moe(
        given.hidden_states, routed.topk_ids, routed.topk_weights * 2.5, weights, clamp=10.0,
        weight_at="combine",
    )  # fmt: skip
    assert torch.equal(y, wanted) and method.runner.runner_backend.value == ours.NAME


def test_what_we_cannot_run_is_refused_where_sglang_starts():
    make, _ = methods()["bf16"]
    with pytest.raises(NotAvailable, match="not summed"):
        make().create_moe_runner(torch.nn.Module(), config(no_combine=True))


def test_without_the_flag_sglang_is_as_it_was():
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.runtime_context import get_flags

    flags, ours_backend = get_flags().moe, get_flags().moe.runner_backend
    flags.runner_backend = MoeRunnerBackend.TRITON
    try:
        make, _ = methods()["bf16"]
        method = make()
        method.create_moe_runner(torch.nn.Module(), config())
        assert method.runner.runner_backend.value == "triton"
    finally:
        flags.runner_backend = ours_backend
