"""MoE as a torch module, the choice of backend, and doctor."""

import copy

import pytest
import torch

import megamoe as mm
from megamoe.engine import backends
from megamoe.errors import CapacityError, NotAvailable
from tests.engine.pretended import E, H, I, K, tokens, weights


def test_the_module_is_the_function():
    layer = mm.MoE(weights(), E, K, clamp=2.0, shared=weights("bf16", 1, 1), combine="fp8")
    wanted = mm.moe(*tokens(), layer.weights, clamp=2.0, shared=layer.shared.weights, combine="fp8")
    assert torch.equal(layer(*tokens()), wanted)


def test_stats_are_added_to_never_overwritten():
    layer = mm.MoE(weights(), E, K)
    total = torch.zeros(E, dtype=torch.int64)
    for seed in range(3):
        x, idx, weight = tokens(seed=seed, masked_ratio=0.3)
        layer(x, idx, weight)
        total += torch.tensor([(idx == e).sum() for e in range(E)])
        assert torch.equal(layer.stats, total)


def test_a_refused_call_changes_nothing():
    layer = mm.MoE(weights(), E, K, max_tokens_per_rank=10)
    layer(*tokens())
    before = layer.stats.clone()
    with pytest.raises(CapacityError, match="max_tokens_per_rank = 10 tokens; got 11"):
        layer(*tokens(11))
    x, idx, weight = tokens()
    idx[3, 1] = E
    with pytest.raises(mm.MegaMoEError, match="token 3, slot 1"):
        layer(x, idx, weight)
    assert torch.equal(layer.stats, before)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "float"])
def test_casting_a_model_leaves_the_experts_bytes_alone(cast):
    model = torch.nn.Sequential(mm.MoE(weights("w8a8"), E, K))
    before = {n: t.clone() for n, t in model[0].weights.state_dict().items()}
    wanted = model[0](*tokens())
    getattr(model, cast)()
    for name, t in model[0].weights.state_dict().items():
        assert t.dtype == before[name].dtype
        assert torch.equal(t.view(torch.uint8), before[name].view(torch.uint8))
    assert torch.equal(model[0](*tokens()), wanted)


@pytest.mark.parametrize("assign", [False, True])
def test_a_models_state_dict_carries_the_experts(assign):
    one = mm.MoE(weights("nvfp4", 0), E, K, shared=weights("w8a8", 5, 1))
    two = mm.MoE(weights("nvfp4", 1), E, K, shared=weights("w8a8", 6, 1))
    assert not torch.equal(one(*tokens()), two(*tokens()))
    two.load_state_dict(copy.deepcopy(one.state_dict()), assign=assign)
    assert torch.equal(one(*tokens()), two(*tokens()))


def test_weights_of_another_shape_do_not_load():
    with pytest.raises(RuntimeError, match="size mismatch"):
        mm.MoE(weights(), E, K).load_state_dict(mm.MoE(weights(experts=4), 4, K).state_dict())


def test_auto_is_the_best_that_works_and_the_rest_says_why_not():
    cpu = torch.device("cpu")
    assert backends.resolve("auto", "auto", cpu).name == "reference"
    assert mm.MoE(weights(), E, K).backend == "reference"
    with pytest.raises(NotAvailable, match="use reference"):
        mm.MoE(weights(), E, K, backend="hopper")
    for mode in ("staged", "fused", "split"):  # one API from laptop to server
        assert torch.equal(mm.moe(*tokens(), weights(), mode=mode), mm.moe(*tokens(), weights()))
        layer = mm.MoE(weights(), E, K, mode=mode)
        assert (
            layer.plan(3).mode == mode and "oracle" in layer.plan(3).why and "oracle" in layer.why
        )


def test_doctor_names_every_backend_and_a_reason(monkeypatch):
    report = mm.doctor()
    named = {f.name: f for f in report.findings}
    for backend in backends.BACKENDS:
        finding = named[f"backend {backend.name}"]
        assert finding.ok == (not backend.why_not(torch.device("cpu")))
        assert finding.detail
    assert report.best["cpu"] == "reference"
    assert "backend reference" in str(report)


def test_the_repr_says_what_the_layer_is():
    assert "w4a8, 8 experts, top_k=2, hidden=96" in repr(mm.MoE(weights(), E, K))


def test_there_is_no_silent_gradient():
    x, idx, weight = tokens()
    x.requires_grad_()
    for call in (lambda *a: mm.moe(*a, weights()), mm.MoE(weights(), E, K)):
        with pytest.raises(NotAvailable, match="no backward: x"):
            call(x, idx, weight)
        with pytest.raises(NotAvailable, match="no backward: topk_weights"):
            call(x.detach(), idx, weight.clone().requires_grad_())
    with torch.no_grad():
        assert mm.moe(x, idx, weight, weights()).shape == x.shape


def test_int32_and_int64_ids_agree():
    x, idx, weight = tokens()
    w = weights()
    assert torch.equal(mm.moe(x, idx.int(), weight, w), mm.moe(x, idx, weight, w))


def test_rows_may_be_strided():
    x, idx, weight = tokens()
    wide = torch.zeros(10, 2 * H, dtype=torch.bfloat16)
    wide[:, :H] = x
    w = weights()
    assert torch.equal(mm.moe(wide[:, :H], idx, weight, w), mm.moe(x, idx, weight, w))


def test_layers_of_one_set_of_weights_do_not_share_what_is_loaded():
    w = weights()
    one, two = mm.MoE(w, E, K), mm.MoE(w, E, K)
    inputs = tokens()
    before = one(*inputs)
    two.load_state_dict(mm.MoE(weights(seed=3), E, K).state_dict())
    assert torch.equal(one(*inputs), before) and torch.equal(mm.moe(*inputs, w), before)
    assert not torch.equal(two(*inputs), before)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_without_weights_takes_a_state_dict(device):
    made = mm.MoE(weights(), E, K, clamp=3.0)
    empty = mm.MoE.empty("w4a8", E, K, H, I, device=device, clamp=3.0)
    if device == "meta":
        empty = empty.to_empty(device="cpu")
    empty.load_state_dict(made.state_dict())
    assert torch.equal(empty(*tokens()), made(*tokens()))


def test_reprs_are_short_and_say_what_is_computed():
    layer = mm.MoE(weights(), E, K, clamp=3.0, weight_at="combine")
    assert "activation=swiglu, clamp=3, weight_at=combine" in repr(layer)
    assert len(repr(layer.weights)) < 200 and len(repr(layer.weights.w13)) < 100
    assert len(repr(layer.plan(4))) < 200


@pytest.mark.parametrize("recipe", ["w4a8_block", "nvfp4"])
def test_moe_is_one_node_of_a_compiled_function_with_the_same_bits(recipe):
    torch.compiler.reset()
    how = {"clamp": 0.5, "combine": "fp8", "mode": "staged", "shared": weights("bf16", 1, 1)}

    @torch.compile(backend="aot_eager", fullgraph=True)
    def model(x, idx, gates, w):
        return mm.moe(x * 1, idx, gates, w, **how) + 1

    for seed in (0, 1):
        w, inputs = weights(recipe, seed), tokens(10, seed=seed)
        assert torch.equal(model(*inputs, w), mm.moe(*inputs, w, **how) + 1)
    with pytest.raises(mm.MegaMoEError, match="token 0, slot 0"):
        model(inputs[0], inputs[1] * 0 + E, inputs[2], w)


def test_what_no_kernel_can_is_refused_in_a_compiled_function_too():
    model = torch.compile(mm.moe, backend="eager", fullgraph=True)
    for bad in ({"activation": "relu"}, {"clamp": float("nan")}, {"overrides": {"block_q": 1}}):
        with pytest.raises(mm.MegaMoEError):
            model(*tokens(), weights(), **bad)


def test_a_load_without_the_experts_leaves_them_as_they_are():
    layer = mm.MoE(weights(), E, K)
    before = layer(*tokens())
    layer.load_state_dict({}, strict=False)
    assert torch.equal(layer(*tokens()), before)


def test_a_layer_of_no_device_takes_tensors_as_they_are():
    made = mm.MoE(weights(), E, K)
    empty = mm.MoE.empty("w4a8", E, K, H, I, device="meta")
    empty.load_state_dict(made.state_dict(), assign=True)
    assert torch.equal(empty(*tokens()), made(*tokens())) and int(empty.stats.sum()) == 10 * K


def test_a_load_forgets_no_fault_of_earlier_calls():
    layer = mm.MoE(weights(), E, K)
    status = layer._status
    layer.load_state_dict(mm.MoE(weights(seed=1), E, K).state_dict(), assign=True)
    layer(*tokens())
    assert layer._status is status


def test_a_recipe_without_a_kernel_on_hopper_is_refused_by_name_and_portable_under_auto():
    problem = mm.Problem(64, 256, 128, 8, 2, 1, "nvfp4a16")
    assert mm.plan(problem, "h200").backend == "portable"
    with pytest.raises(NotAvailable, match=r"backend hopper .*no kernel for recipe nvfp4a16"):
        mm.plan(problem, "h200", backend="hopper")


def test_a_layer_alone_has_no_chain_and_no_tile_that_no_backend_has():
    w = mm.ExpertWeights.quantize(
        torch.randn(4, 256, 128).bfloat16(), torch.randn(4, 128, 128).bfloat16(), recipe="w8a8"
    )
    call = torch.randn(2, 128).bfloat16(), *mm.route(torch.randn(2, 4), mm.Router(4, 2))
    with pytest.raises(mm.NotAvailable, match="the chain is for ranks"):
        mm.MoE(w, 4, 2, mode="chain")(*call)
    with pytest.raises(mm.NotAvailable, match="the chain is for ranks"):
        mm.moe(*call, w, mode="chain")
    with pytest.raises(mm.RangeError, match="block_m must be a power of two"):
        mm.moe(*call, w, overrides={"block_m": 7})


def test_an_empty_layer_lies_on_torchs_default_device():
    with torch.device("meta"):
        empty = mm.MoE.empty("w4a8", E, K, H, I)
        assert mm.ExpertWeights.empty("w8a8", E, H, I).device.type == "meta"
    assert empty.weights.device.type == "meta" and empty.stats.is_meta
    assert mm.MoE.empty("w4a8", E, K, H, I).weights.device.type == "cpu"


@pytest.mark.parametrize("how", ["never", "load", "refresh", "nothing"])
def test_a_call_before_the_first_load_is_logged_once(how, caplog):
    made, empty = mm.MoE(weights(), E, K), mm.MoE.empty("w4a8", E, K, H, I)
    if how == "load":
        empty.load_state_dict(made.state_dict())
    elif how == "refresh":
        empty.refresh(torch.randn(E, 2 * I, H), torch.randn(E, H, I))
    elif how == "nothing":
        empty.load_state_dict({}, strict=False)
    for num in (10, 4):
        empty(*tokens(num))
    is_blank = how in ("never", "nothing")
    assert caplog.text.count("called before any experts were loaded") == is_blank
