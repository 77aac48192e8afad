"""The SGLang plugin with small stand-ins for the parts of SGLang that it touches."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import megamoe as mm
from megamoe.errors import NotAvailable, RangeError
from megamoe.integrations import sglang as ours
from megamoe.integrations.stacked import Stacked
from tests.integrations.test_vllm import E, K, rng, routing, stacked

BF16, FP8, MX = ours.METHODS.values()


def config(**changes):
    """What the plugin reads of a MoeRunnerConfig."""
    usual = {
        "activation": "silu", "is_gated": True, "top_k": K, "num_local_experts": E,
        "num_fused_shared_experts": None, "gemm1_alpha": None, "gemm1_beta": None,
        "gemm1_clamp_limit": None, "swiglu_limit": None, "gate_up_interleaved": True,
        "apply_router_weight_on_input": False, "no_combine": False, "routed_scaling_factor": None,
        "params_dtype": torch.bfloat16,
    }  # fmt: skip
    return SimpleNamespace(**usual | changes)


def test_a_limit_of_0_is_none():
    assert ours.gate_of(config(swiglu_limit=0.0)) == ("swiglu", None, "split")
    assert ours.gate_of(config(gemm1_clamp_limit=0.0)) == ("swiglu", None, "split")
    oss = {"gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gate_up_interleaved": False}
    assert ours.gate_of(config(**oss)) == ("gpt_oss", None, "split")
    assert ours.gate_of(config(**oss, gemm1_clamp_limit=0.0)) is None  # ours would clamp at 7


def layer_of(tensors, **names):
    made = torch.nn.Module()
    for key, value in tensors.items():
        parameter = torch.nn.Parameter(value, requires_grad=False)
        made.register_parameter(names.get(key, key), parameter)
    return made


def dispatched():
    x, ids, weights = routing()
    ids[1, 0] = -1
    return SimpleNamespace(
        hidden_states=x, topk_output=SimpleNamespace(topk_ids=ids, topk_weights=weights)
    )


@pytest.fixture
def server(monkeypatch):
    """Modules of SGLang, as far as they are imported; `asked` is --moe-runner-backend."""
    state = SimpleNamespace(asked=ours.NAME, cores={}, choices=[], hooks={})

    class Core:
        def __init__(self, config):
            self.config = config

    class Runner:
        def __init__(self, backend, config):
            self.runner_backend, self.core = backend, state.cores[backend.value](config)

        def run(self, given, info):
            return self.core.run_from_dispatch(given, info, self.core.config)

    def register(target, hook, kind):
        assert kind == "around"
        state.hooks[target] = hook

    parts = {
        "arg_groups.choices": {"add_moe_runner_backend_choices": state.choices.extend},
        "layers.moe.moe_runner": {
            "register_moe_runner_core": state.cores.__setitem__, "MoeRunner": Runner,
        },
        "layers.moe.moe_runner.base": {"DispatchMoeRunnerCore": Core},
        "layers.moe.token_dispatcher": {"StandardCombineInput": SimpleNamespace},
        "layers.moe.utils": {
            "get_moe_runner_backend": lambda: SimpleNamespace(value=state.asked),
            "resolve_moe_runner_backend": lambda name: SimpleNamespace(value=name),
        },
        "plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(register=register),
            "HookType": SimpleNamespace(AROUND="around"),
        },
    }  # fmt: skip
    names = {f"sglang.srt.{part}" for part in parts}
    for name in sorted({".".join(n.split(".")[:i]) for n in names for i in range(1, 9)} | names):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for part, values in parts.items():
        vars(sys.modules[f"sglang.srt.{part}"]).update(values)
    ours.register()
    return state


def hook(server, method, name):
    return server.hooks[f"sglang.srt.layers.quantization.{method}.{name}"]


def own(*args, **options):
    raise AssertionError("SGLang's own")


CASES = {
    "bf16": ("unquant.UnquantizedFusedMoEMethod", "bf16", {}, {}),
    "fp8": (
        "fp8.Fp8MoEMethod", "w8a8",
        {"w13_scale": "w13_weight_scale_inv", "w2_scale": "w2_weight_scale_inv"},
        {"weight_block_size": [128, 128], "is_fp4_expert": False},
    ),
    "fp4 of DeepSeek-V4": (
        "fp8.Fp8MoEMethod", "w4a8",
        {"w13_scale": "w13_weight_scale_inv", "w2_scale": "w2_weight_scale_inv"},
        {"is_fp4_expert": True},
    ),
    "mxfp4": (
        "mxfp4.Mxfp4MoEMethod", "w4a16",
        {"w13_scale": "w13_weight_scale", "w2_scale": "w2_weight_scale"}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_method_runs_through_our_runner(server, name):
    at, recipe, names, attributes = CASES[name]
    w, tensors = stacked(recipe)
    if name.startswith("fp4"):  # loaded as float32 powers of two
        for key in ("w13_scale", "w2_scale"):
            tensors[key] = (tensors[key].int() << 23).view(torch.float32)
    method, one = SimpleNamespace(**attributes), layer_of(tensors, **names)
    given = config(swiglu_limit=10.0, routed_scaling_factor=2.5)
    hook(server, at, "create_moe_runner")(own, method, one, given)
    hook(server, at, "process_weights_after_loading")(own, method, one)
    output = dispatched()
    y = hook(server, at, "apply")(own, method, one, output).hidden_states
    routed = output.topk_output
    wanted = mm.moe(
        output.hidden_states, routed.topk_ids, routed.topk_weights * 2.5, w, clamp=10.0,
        weight_at="combine",
    )  # fmt: skip
    assert torch.equal(y, wanted) and method.runner.runner_backend.value == ours.NAME
    with pytest.raises(NotAvailable, match="second time"):
        hook(server, at, "process_weights_after_loading")(own, method, one)
    one.should_fuse_routed_scaling_factor_in_topk = True  # then the weights have it already
    again = hook(server, at, "apply")(own, method, one, output).hidden_states
    assert not torch.equal(again, y)


@pytest.mark.parametrize(
    ("arch", "recipe"), [("sm_90", "w4a8_block"), ("sm_100", "w4a8"), ("cpu", "w4a8")]
)
def test_fp4_has_the_recipe_that_the_gpu_multiplies_fast(monkeypatch, arch, recipe):
    monkeypatch.setattr(ours, "arch_of", lambda device: arch)
    w, tensors = stacked("w4a8")
    one = layer_of(tensors, w13_scale="w13_weight_scale_inv", w2_scale="w2_weight_scale_inv")
    layer = ours.make_layer(SimpleNamespace(is_fp4_expert=True), one, FP8, config())
    assert layer.weights.recipe == recipe
    assert all(map(torch.equal, layer.weights.state_dict().values(), w.state_dict().values()))


class Loaded(torch.nn.Parameter):
    """As SGLang's ModelWeightParameter keeps its loader."""

    def __new__(cls, data):
        return super().__new__(cls, data, requires_grad=False)

    _weight_loader = None

    @property
    def weight_loader(self):
        return self._weight_loader


@pytest.mark.parametrize("kind", ["plain", "SGLang's own"])
def test_a_load_into_a_running_server_is_refused_by_name(kind):
    """update_weights calls the loader of each parameter before anything of ours."""
    _, tensors = stacked("bf16")
    one = layer_of(tensors)
    for name, t in list(one.named_parameters()):
        if kind == "plain":
            t.weight_loader = lambda *args, **options: None
        else:
            setattr(one, name, Loaded(t.detach()))
    ours.make_layer(SimpleNamespace(), one, BF16, config())
    for name, t in one.named_parameters():
        with pytest.raises(NotAvailable, match="second time; start SGLang without --moe-runner"):
            t.weight_loader(t, torch.ones(1), name, shard_id="w1", expert_id=0)


def test_gpt_oss_has_its_gate_order_and_biases():
    w, tensors = stacked("w4a16", "interleaved", bias=True)
    names = {"w13_scale": "w13_weight_scale", "w2_scale": "w2_weight_scale",
             "w13_bias": "w13_weight_bias", "w2_bias": "w2_weight_bias"}  # fmt: skip
    one = layer_of(tensors, **names)
    given = config(gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
    assert ours.why_not(SimpleNamespace(), MX, given) == ""
    made = ours.make_layer(SimpleNamespace(), one, MX, given)
    x, ids, weights = routing()
    wanted = mm.moe(x, ids, weights, w, weight_at="combine", activation="gpt_oss")
    assert torch.equal(made(x, ids, weights), wanted)
    assert one.w13_weight.numel() == 0  # not held twice


def test_without_the_flag_the_hooks_step_aside(server):
    server.asked = "triton"
    for name in ("create_moe_runner", "process_weights_after_loading", "apply"):
        around = hook(server, "fp8.Fp8MoEMethod", name)
        assert around(lambda *args: ("SGLang's", args), 1, 2) == ("SGLang's", (1, 2))


def test_the_name_is_a_choice_of_the_flag(server):
    assert server.choices == [ours.NAME] and set(server.cores) == {ours.NAME}
    assert len(server.hooks) == 9


BLOCKS = SimpleNamespace(weight_block_size=[128, 128])
REFUSED = {
    "FP8 per matrix": (SimpleNamespace(weight_block_size=None), FP8, {}, "FP8 scales per None"),
    "MXFP8": (
        SimpleNamespace(weight_block_size=[128, 128], use_mxfp8=True), FP8, {}, "FP8 scales"
    ),
    "gelu": (BLOCKS, FP8, {"activation": "gelu"}, "activation gelu"),
    "no gate": (BLOCKS, FP8, {"is_gated": False}, "activation silu"),
    "another alpha": (BLOCKS, FP8, {"gemm1_alpha": 1.5}, "1.5"),
    "a clamp after silu": (BLOCKS, FP8, {"gemm1_clamp_limit": 7.0}, "7.0"),
    "weights on tokens": (BLOCKS, FP8, {"apply_router_weight_on_input": True}, "on tokens"),
    "rows apart": (BLOCKS, FP8, {"no_combine": True}, "not summed"),
    "shared": (BLOCKS, FP8, {"num_fused_shared_experts": 1}, "--disable-shared-experts-fusion"),
    "FP16": (BLOCKS, FP8, {"params_dtype": torch.float16}, "float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_cannot_run_is_refused_by_name(server, name):
    method, how, changes, says = REFUSED[name]
    assert says in ours.why_not(method, how, config(**changes))
    with pytest.raises(NotAvailable, match="leave the flag out"):
        ours.create_moe_runner(how, method, None, config(**changes))


def test_scales_that_are_no_powers_of_two_are_refused():
    _, tensors = stacked("w4a8")
    tensors["w13_scale"] = torch.rand(tensors["w13_scale"].shape, generator=rng()) + 1.25
    one = layer_of(tensors, w13_scale="w13_weight_scale_inv", w2_scale="w2_weight_scale_inv")
    with pytest.raises(RangeError, match="powers of two"):
        ours.make_layer(SimpleNamespace(is_fp4_expert=True), one, FP8, config())


def test_a_recipe_must_take_the_bytes():
    from megamoe.integrations.stacked import experts_of

    _, tensors = stacked("bf16")
    with pytest.raises(mm.MegaMoEError, match="must take bf16 weights"):
        experts_of(layer_of(tensors), Stacked("bf16"), recipe="w8a8")
