"""The vLLM plugin without vLLM: layers that have the attributes it documents, and no others."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megamoe as mm
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError
from megamoe.formats.spec import recipe_named
from megamoe.integrations.vllm import exchange, layers, plugin
from tests.distributed.ranks import launch

E, K, H, I, T = 4, 2, 64, 32, 5
HERE = layers.Settings(backend="reference")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def routing(num_experts=E):
    x = torch.randn(T, H, generator=rng(1)).bfloat16()
    ids = torch.rand(T, num_experts, generator=rng(2)).topk(K).indices.int()
    return x, ids, torch.rand(T, K, generator=rng(3))


def stacked(recipe, gate_up="split", bias=False, seed=0):
    """Experts of ours, and the tensors that vLLM would have loaded for them."""
    w13, w2 = (torch.randn(s, generator=rng(seed)) / 8 for s in ((E, 2 * I, H), (E, H, I)))
    b13, b2 = (None,) * 2
    if bias:
        b13, b2 = (torch.randn(s, generator=rng(seed + 4)) for s in ((E, 2 * I), (E, H)))
    acts = {"x_global": 0.01, "acts_global": torch.linspace(0.01, 0.02, E)}
    extra = acts if recipe == "nvfp4" else {}
    w = mm.ExpertWeights.quantize(w13, w2, recipe, b13=b13, b2=b2, gate_up=gate_up, **extra)

    def rows(t):  # back to the order of a checkpoint
        t = t.flatten(1, 2) if gate_up == "split" else t.transpose(1, 2).flatten(1, 2)
        return t.contiguous()

    found = {"w13_weight": rows(w.w13.data), "w2_weight": w.w2.data}
    if w.w13.scale is not None:
        found |= {"w13_scale": rows(w.w13.scale), "w2_scale": w.w2.scale}
    if bias:
        found |= {"w13_bias": b13.bfloat16(), "w2_bias": b2.bfloat16()}
        w = mm.ExpertWeights.quantize(
            w13, w2, recipe, b13=b13.bfloat16(), b2=b2.bfloat16(), gate_up=gate_up
        )
    return w, found


def method(name, **attributes):
    made = type(name, (), {})()
    vars(made).update(attributes)
    return made


def layer(tensors=(), **changes):
    """What the plugin reads of a RoutedExperts; anything else would raise AttributeError."""
    ranks = SimpleNamespace(enable_eplb=False, use_all2all_kernels=False, all2all_backend="naive",
                            pcp_size=1, use_ep=False, ep_size=1)  # fmt: skip
    config = SimpleNamespace(
        in_dtype=torch.bfloat16, device="cpu", has_bias=False, is_lora_enabled=False,
        intermediate_size_per_partition=I, activation_situ_beta=None,
        activation_situ_linear_beta=None, moe_parallel_config=ranks,
    )  # fmt: skip
    made = SimpleNamespace(
        activation=SimpleNamespace(value="silu"), top_k=K, local_num_experts=E,
        global_num_experts=E, hidden_size=H, expert_map=None, apply_router_weight_on_input=False,
        swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None,
        expert_map_manager=SimpleNamespace(), moe_config=config,
    )  # fmt: skip
    for key, value in changes.items():
        at = next((o for o in (made, config, ranks) if hasattr(o, key)), made)
        setattr(at, key, value)
    for key, value in dict(tensors).items():
        setattr(made, key, torch.nn.Parameter(value, requires_grad=False))
    return made


def renamed(tensors, **names):
    return {names.get(key, key): value for key, value in tensors.items()}


FP8 = {"w13_scale": "w13_weight_scale_inv", "w2_scale": "w2_weight_scale_inv"}
MX = {"w13_scale": "w13_weight_scale", "w2_scale": "w2_weight_scale"}
PACKED = MX | {"w13_weight": "w13_weight_packed", "w2_weight": "w2_weight_packed"}


# -- layers that are taken -----------------------------------------------------------------------

SIMPLE = {
    "bf16": ("UnquantizedFusedMoEMethod", "bf16", {}, {}),
    "fp8": ("Fp8MoEMethod", "w8a8", FP8, {"weight_block_size": [128, 128]}),
    "fp8 compressed": (
        "CompressedTensorsW8A8Fp8MoEMethod", "w8a8", MX, {"weight_block_size": [128, 128]}
    ),
    "mxfp4": ("Mxfp4MoEMethod", "w4a16", MX, {}),
    "mxfp4 compressed": ("CompressedTensorsW4A4Mxfp4MoEMethod", "w4a16", PACKED, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SIMPLE)
def test_experts_are_taken_as_they_were_loaded(name):
    cls, recipe, names, attributes = SIMPLE[name]
    w, tensors = stacked(recipe)
    one, how = layer(renamed(tensors, **names)), method(cls, **attributes)
    assert layers.why_not(one, how, HERE) == ""
    values = getattr(one, names.get("w13_weight", "w13_weight"))
    address = values.data_ptr()
    made = layers.make_layer(one, how, HERE)
    x, ids, weights = routing()
    y = layers.apply(one, made, x, weights, ids)
    assert torch.equal(y, mm.moe(x, ids, weights, w, weight_at="combine"))
    assert made.weights.w13.data.data_ptr() == address and values.numel() == 0  # held once, by us


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("use_a16", [False, True])
def test_nvfp4_factors_enter_in_their_direction(is_compressed, use_a16):
    w, tensors = stacked("nvfp4")
    g13 = w.w13.global_scale[:, None].expand(E, 2).contiguous()
    factors = {"w13_weight_scale_2": g13, "w2_weight_scale_2": w.w2.global_scale,
               "w13_input_scale": w.x_global.expand(E, 2).contiguous() * torch.tensor([1.0, 0.5]),
               "w2_input_scale": w.acts_global}  # fmt: skip
    names, cls = MX, "ModelOptNvFp4FusedMoE"
    if is_compressed:
        names, cls = PACKED, "CompressedTensorsW4A4Nvfp4MoEMethod"
        factors = {
            key.replace("scale_2", "global_scale").replace("input_scale", "input_global_scale"):
            t.reciprocal() for key, t in factors.items()
        }  # fmt: skip
    if use_a16:  # vLLM leaves them as they were allocated
        factors |= {k: torch.full_like(t, float("nan")) for k, t in factors.items() if "input" in k}
    one, how = layer(renamed(tensors, **names) | factors), method(cls, use_a16=use_a16)
    assert layers.why_not(one, how, HERE) == ""
    made = layers.make_layer(one, how, HERE)
    assert made.weights.recipe == ("nvfp4a16" if use_a16 else "nvfp4")
    for ours, theirs in zip(made.weights.dequantize(), w.dequantize(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    if not use_a16:
        torch.testing.assert_close(made.weights.x_global, w.x_global)
        torch.testing.assert_close(made.weights.acts_global, w.acts_global)


def test_gpt_oss_rows_are_interleaved():
    w, tensors = stacked("w4a16", "interleaved", bias=True)
    one = layer(
        renamed(tensors, **MX), activation=SimpleNamespace(value="swigluoai"), has_bias=True
    )
    how = method("GptOssMxfp4MoEMethod")
    assert layers.why_not(one, how, HERE) == ""
    made = layers.make_layer(one, how, HERE)
    x, ids, weights = routing()
    y = layers.apply(one, made, x, weights, ids)
    assert torch.equal(y, mm.moe(x, ids, weights, w, weight_at="combine", activation="gpt_oss"))
    assert one.w13_weight.numel() == one.w13_bias.numel() == 0  # not held twice


def test_mxfp4_has_the_recipe_that_was_asked_for():
    w, tensors = stacked("w4a16")
    asked = layers.settings_of({"megamoe": {"backend": "reference", "mxfp4": "w4a8_block"}})
    made = layers.make_layer(layer(renamed(tensors, **MX)), method("Mxfp4MoEMethod"), asked)
    assert made.weights.recipe == "w4a8_block"
    assert torch.equal(made.weights.w13.data, w.w13.data)


GATES = {
    ("silu", None, None, None): ("swiglu", None, "split"),
    ("silu", 10.0, None, None): ("swiglu", 10.0, "split"),
    ("silu", 0.0, None, None): ("swiglu", None, "split"),
    ("swigluoai_uninterleave", 0.0, None, None): ("swiglu", None, "split"),
    ("swigluoai_uninterleave", 0.0, 1.702, 1.0): None,
    ("swigluoai", 0.0, None, None): None,
    ("swigluoai", None, None, None): ("gpt_oss", None, "interleaved"),
    ("swigluoai_uninterleave", 7.0, 1.702, 1.0): ("gpt_oss", 7.0, "split"),
    ("swigluoai_uninterleave", 7.0, None, None): ("swiglu", 7.0, "split"),
    ("gelu", None, None, None): ("geglu", None, "split"),
    ("gelu_tanh", None, None, None): ("geglu_tanh", None, "split"),
    ("silu", None, 1.5, None): None,
    ("swigluoai", 7.0, 1.5, 1.0): None,
    ("gelu", 3.0, None, None): None,
    ("situ", None, None, None): None,
    ("relu2_no_mul", None, None, None): None,
}


@pytest.mark.parametrize("theirs", GATES, ids=str)
def test_a_gate_is_one_of_ours_or_refused(theirs):
    name, limit, alpha, beta = theirs
    one = layer(activation=SimpleNamespace(value=name), swiglu_limit=limit, swiglu_alpha=alpha,
                swiglu_beta=beta)  # fmt: skip
    wanted = GATES[theirs]
    assert layers.gate_of(one) == (None if wanted is None else layers.Gate(*wanted))


def test_situ_is_taken_with_the_constants_that_we_have():
    name = SimpleNamespace(value="situ")
    one = layer(activation=name, activation_situ_beta=4.0, activation_situ_linear_beta=25.0)
    assert layers.gate_of(one) == layers.Gate("situ")


# -- expert parallelism ----------------------------------------------------------------------------


def test_two_ranks_with_vllms_expert_map_add_up_to_the_whole_layer():
    w, tensors = stacked("bf16")
    x, ids, weights = routing()
    ids[0, 1] = -1  # vLLM pads with -1
    total = torch.zeros(T, H)
    for rank in range(2):
        mine = range(rank * E // 2, (rank + 1) * E // 2)
        found = torch.full((E,), -1, dtype=torch.int32)
        found[list(mine)] = torch.arange(len(mine), dtype=torch.int32)
        part = {key: t[list(mine)] for key, t in tensors.items()}
        one = layer(part, expert_map=found, local_num_experts=len(mine))
        how = method("UnquantizedFusedMoEMethod")
        assert layers.why_not(one, how, HERE) == ""
        made = layers.make_layer(one, how, HERE)
        total += layers.apply(one, made, x, weights, ids).float()
    whole = mm.moe(x, ids, weights, w, weight_at="combine").float()
    assert float((total - whole).norm() / whole.norm()) < recipe_named("bf16").tolerance


# By name: whether ranks share a batch, and how vLLM places experts.
OVER = {"own tokens": (False, "linear"), "shared batch": (True, "linear"),
        "round robin": (False, "round_robin")}  # fmt: skip


def over_group(rank, name, fmt):
    """One rank of two: what its layer gives, and the tokens of the fullest rank in each call."""
    import torch.distributed as dist

    shares, strategy = OVER[name]
    w, tensors = stacked(fmt)
    mine = list(range(rank, E, 2)) if strategy == "round_robin" else [2 * rank, 2 * rank + 1]
    extra, cls = {}, "UnquantizedFusedMoEMethod"
    if fmt == "nvfp4":  # each rank has seen other tokens: all take the largest scale
        cls, tensors = "ModelOptNvFp4FusedMoE", renamed(tensors, **MX)
        x_global = w.x_global.expand(E) * torch.tensor([0.5, 1.0, 0.5, 0.25])
        extra = {"w13_weight_scale_2": w.w13.global_scale[:, None].expand(E, 2).contiguous(),
                 "w2_weight_scale_2": w.w2.global_scale, "w2_input_scale": w.acts_global,
                 "w13_input_scale": x_global[:, None].expand(E, 2).contiguous()}  # fmt: skip
    one = layer(
        {key: t[mine] for key, t in {**tensors, **extra}.items()}, local_num_experts=len(mine),
        use_ep=True, ep_size=2, use_all2all_kernels=True,
        expert_map_manager=SimpleNamespace(placement_strategy=strategy),
    )  # fmt: skip
    asked = layers.Settings("reference", exchange="megamoe")
    assert exchange.is_wanted(one, asked.exchange) and not exchange.why_not(one, SimpleNamespace())
    assert layers.why_not(one, method(cls), asked, exchanges=True) == ""
    by_rank, bounds = [], []

    def gather(rows):
        every = [torch.empty_like(rows) for _ in range(2)]
        dist.all_gather(every, rows)
        return torch.cat(every)

    over = exchange.Over(
        dist.group.WORLD, E, exchange.placement_of(one.expert_map_manager, E, 2), T,
        exchange.Sharers(2, rank, gather) if shares else None, lambda: by_rank[-1],
    )  # fmt: skip
    made = layers.make_layer(one, method(cls), asked, over)
    assert one.w13_weight.numel() == 0

    def forward(x, ids, weights, max_tokens):
        bounds.append(max_tokens)
        return type(made).forward(made, x, ids, weights)

    made.forward, exchange.TAKES_BOUND = forward, True
    found = []
    for num in (T, 1, 0):  # rank 1 has fewer
        x, ids, weights = routing()
        sizes = [num, num] if shares else [num, num // 2]
        by_rank.append(None if shares else sizes)
        x, ids, weights = (t[: sizes[rank]] for t in (x, ids, weights))
        found.append(layers.apply(one, made, x, weights, ids, over).tolist())
    return found, bounds


@pytest.mark.parametrize(
    ("name", "fmt"), [*((name, "bf16") for name in OVER), ("own tokens", "nvfp4")]
)
def test_two_ranks_that_exchange_tokens_themselves_have_the_bits_of_one(name, fmt):
    ends = launch(2, over_group, name, fmt, limit_s=120)
    assert [end.error for end in ends] == ["", ""]
    w, _ = stacked(fmt)
    x, ids, weights = routing()
    wanted = mm.moe(x, ids, weights, w, weight_at="combine")
    for rank, end in enumerate(ends):
        found, bounds = end.result
        for num, y in zip((T, 1, 0), found, strict=True):
            mine = num if OVER[name][0] or rank == 0 else num // 2
            assert torch.equal(torch.tensor(y).view(mine, H), wanted[:mine].float())
        assert bounds == ([-(-T // 2), 1, 0] if OVER[name][0] else [T, 1, 0])


REASONS = {
    "experts": ({"global_num_experts": 5}, {}, "5 experts do not divide by 2 ranks"),
    "elastic": ({}, {"enable_elastic_ep": True}, "elastic"),
    "two batches": ({}, {"enable_dbo": True}, "dual batch overlap"),
    "the model adds": ({"skip_final_all_reduce": True}, {}, "adds the ranks' rows itself"),
}


@pytest.mark.parametrize("name", REASONS)
def test_where_we_cannot_exchange_vllm_does(name):
    changes, config, says = REASONS[name]
    one = layer(use_ep=True, ep_size=2)
    one.global_num_experts = changes.get("global_num_experts", E)
    one.moe_config.skip_final_all_reduce = changes.get("skip_final_all_reduce", False)
    assert says in exchange.why_not(one, SimpleNamespace(**config))
    assert not exchange.is_wanted(one, "vllm") and not exchange.is_wanted(layer(), "megamoe")


def test_no_bound_is_above_the_layers_own():
    """Sequence-parallel ranks share what vLLM may count as the tokens of one."""
    bounds = [
        exchange.Over(None, E, None, T, None, lambda by_rank=by_rank: by_rank)._bound(1)
        for by_rank in (None, [1, 2], [2 * T, 1])
    ]
    assert bounds == [None, 2, T]


def test_calls_that_wait_for_the_host_are_refused_where_vllm_captures_them():
    staged = SimpleNamespace(mode="staged", why="backend portable: asked for")
    over = exchange.Over(None, E, None, T, None, lambda: None, is_captured=True)
    with pytest.raises(NotAvailable, match="--enforce-eager"):
        over.check(staged)
    over.check(SimpleNamespace(mode="chain", why=""))


# -- layers that stay vLLM's -----------------------------------------------------------------------

BF16 = method("UnquantizedFusedMoEMethod")
LEFT = {
    "another method": (method("AWQMoEMethod"), {}, "experts of AWQMoEMethod"),
    "FP8 per matrix": (method("Fp8MoEMethod", weight_block_size=None), {}, "rows or matrices"),
    "FP8 cut": (
        method("Fp8MoEMethod", weight_block_size=[128, 128], weight_scale_refine=(2, 2)), {},
        "tensor parallelism cuts",
    ),
    "activation": (BF16, {"activation": SimpleNamespace(value="relu2_no_mul")}, "relu2_no_mul"),
    "FP16": (BF16, {"in_dtype": torch.float16}, "float16"),
    "widths": (BF16, {"intermediate_size_per_partition": 720 // 16}, "no multiples of 32"),
    "top_k": (BF16, {"top_k": 8}, "top_k 8 with 4 experts"),
    "weights on tokens": (BF16, {"apply_router_weight_on_input": True}, "multiply the tokens"),
    "shared": (
        BF16, {"expert_map_manager": SimpleNamespace(num_fused_shared_experts=1)}, "shared experts"
    ),
    "LoRA": (BF16, {"is_lora_enabled": True}, "LoRA"),
    "EPLB": (BF16, {"enable_eplb": True}, "EPLB"),
    "all2all": (
        BF16, {"use_all2all_kernels": True, "all2all_backend": "deepep_low_latency"},
        "deepep_low_latency: use allgather_reducescatter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_we_cannot_do_stays_vllms_with_a_reason(name):
    how, changes, says = LEFT[name]
    assert says in layers.why_not(layer(**changes), how, HERE)


def test_without_a_backend_only_hopper_is_taken(monkeypatch):
    assert "needs an H100" in layers.why_not(layer(), BF16, layers.Settings())
    monkeypatch.setattr(layers.backends, "reasons_on", lambda device: {"hopper": ""})
    assert layers.why_not(layer(), BF16, layers.Settings()) == ""
    gelu = layer(activation=SimpleNamespace(value="gelu"))
    assert "no kernel for activation geglu" in layers.why_not(gelu, BF16, layers.Settings())
    a16 = method("ModelOptNvFp4FusedMoE", use_a16=True)
    assert "no kernel for recipe nvfp4a16" in layers.why_not(layer(), a16, layers.Settings())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, layers.Settings()),
        (None, layers.Settings()),
        ({"megamoe": True}, layers.Settings()),
        ({"megamoe": False}, None),
        ({"megamoe": {"backend": "portable"}}, layers.Settings("portable")),
    ],
)
def test_settings_come_from_additional_config(given, wanted):
    assert layers.settings_of(given) == wanted


@pytest.mark.parametrize("given", [{"recipe": "w8a8"}, "off", {"backend": "x"}, {"mxfp4": "w8a8"}])
def test_other_settings_are_refused(given):
    with pytest.raises(RangeError):
        layers.settings_of({"megamoe": given})


RELOADED = {"bf16": ("UnquantizedFusedMoEMethod", {}), "w8a8": ("Fp8MoEMethod", FP8),
            "w4a16": ("GptOssMxfp4MoEMethod", MX)}  # fmt: skip


@pytest.mark.parametrize("recipe", RELOADED)
def test_weights_that_are_loaded_again_go_into_the_same_memory(recipe):
    """As vLLM reloads: fresh parameters, then the method is asked to process them once more."""
    cls, names = RELOADED[recipe]
    is_oss = recipe == "w4a16"
    order = "interleaved" if is_oss else "split"
    how = method(cls, weight_block_size=[128, 128])
    gate = {"activation": SimpleNamespace(value="swigluoai" if is_oss else "silu")}
    first, again = (stacked(recipe, order, bias=is_oss, seed=seed) for seed in (0, 9))
    one = layer(renamed(first[1], **names), **gate)
    made = layers.make_layer(one, how, HERE)
    held = {name: t.data_ptr() for name, t in made.weights.held().items()}
    x, ids, weights = routing()
    before = layers.apply(one, made, x, weights, ids)
    for name, t in renamed(again[1], **names).items():
        setattr(one, name, torch.nn.Parameter(t, requires_grad=False))
    layers.reload(one, how, HERE, made)
    assert held == {name: t.data_ptr() for name, t in made.weights.held().items()}
    assert one.w13_weight.numel() == one.w2_weight.numel() == 0
    y = layers.apply(one, made, x, weights, ids)
    options = {"activation": "gpt_oss"} if is_oss else {}
    assert torch.equal(y, mm.moe(x, ids, weights, again[0], weight_at="combine", **options))
    assert not torch.equal(y, before)


def test_slots_of_padding_rows_are_left_out_whatever_their_weights():
    w, tensors = stacked("bf16")
    one = layer(tensors)
    made = layers.make_layer(one, BF16, HERE)
    x, ids, weights = routing()
    weights[0, 1], weights[2] = float("nan"), float("inf")
    x[2] = float("nan")
    y = layers.apply(one, made, x, weights, ids)
    ids[0, 1], ids[2] = -1, -1
    wanted = mm.moe(x, ids, weights.nan_to_num(0, 0), w, weight_at="combine")
    assert torch.equal(y, wanted) and not wanted[2].any()


def test_bad_tensors_are_refused_by_name():
    _, tensors = stacked("bf16")
    with pytest.raises(ShapeError, match="must have w2_weight"):
        layers.make_layer(layer({"w13_weight": tensors["w13_weight"]}), BF16, HERE)
    one = layer(tensors)
    made = layers.make_layer(one, BF16, HERE)
    x, ids, weights = routing()
    with pytest.raises(DTypeError, match="bfloat16"):
        layers.apply(one, made, x.float(), weights, ids)


# -- the door --------------------------------------------------------------------------------------


class UnquantizedFusedMoEMethod(torch.nn.Module):
    """Stands for vLLM's, which is a module too."""

    is_monolithic = True

    def process_weights_after_loading(self, layer):
        raise AssertionError("vLLM's own")

    def create_weights(self, layer):
        return "vLLM's own"


@pytest.fixture
def door(monkeypatch):
    said = []
    monkeypatch.setattr(plugin, "say", said.append)
    config = SimpleNamespace(additional_config={"megamoe": {"backend": "reference"}})
    monkeypatch.setattr(plugin, "_config", lambda: config)
    return said


def test_a_method_of_vllm_becomes_ours_and_keeps_its_loading(door):
    w, tensors = stacked("bf16")
    one = layer(tensors)
    made = plugin.choose(one, UnquantizedFusedMoEMethod)
    assert type(made).__name__ == "UnquantizedFusedMoEMethod"  # vLLM's loaders compare names
    assert isinstance(made, UnquantizedFusedMoEMethod) and not made.is_monolithic
    assert made.create_weights(one) == "vLLM's own"
    assert made.maybe_roundup_sizes(H, I, torch.bfloat16, None) == (H, I)
    made.process_weights_after_loading(one)
    assert not list(made.children())  # our tensors are no part of the model's tree
    x, ids, weights = routing()
    y = made.apply(one, x, weights, ids, None, None)
    assert torch.equal(y, mm.moe(x, ids, weights, w, weight_at="combine"))
    assert len(door) == 1 and "4 experts 64 x 32" in door[0] and "bf16" in door[0]
    with pytest.raises(NotAvailable, match="is_checkpoint_format=True"):
        made.process_weights_after_loading(one)


def test_what_is_left_is_vllms_own_object_and_its_own_error(door):
    one = layer(is_lora_enabled=True)
    assert type(plugin.choose(one, UnquantizedFusedMoEMethod)) is UnquantizedFusedMoEMethod
    assert door == ["vLLM's own experts: LoRA"]

    def fails():
        raise NotImplementedError("no kernel here")

    with pytest.raises(NotImplementedError, match="no kernel here"):
        plugin.choose(layer(), fails)


def test_a_format_without_a_kernel_of_vllms_is_taken(door, monkeypatch):
    """As on a CPU, where vLLM picks no FP8 kernel."""

    def none(**options):
        raise ValueError("no FP8 kernel here")

    module = SimpleNamespace(select_fp8_moe_backend=none)
    monkeypatch.setitem(sys.modules, f"{plugin.QUANTIZATION}.fp8", module)

    class Fp8MoEMethod:
        weight_block_size = (128, 128)

        def __init__(self):
            self.backend, self.experts = module.select_fp8_moe_backend(config=None)

    made = plugin.choose(layer(), Fp8MoEMethod)
    assert isinstance(made, Fp8MoEMethod) and made.backend is None and not made.is_monolithic
    assert module.select_fp8_moe_backend is none
    with pytest.raises(ValueError, match="no FP8 kernel here"):
        plugin.choose(layer(is_lora_enabled=True), Fp8MoEMethod)


CALLS = Path(__file__).parents[1] / "data" / "deep_gemm_calls.json"
ASKED = json.loads(CALLS.read_text())["methods"]
VLLMS_OWN = {"create_weights", "moe_quant_config", "uses_weight_scale_2_pattern", "quant_config",
             "apply_monolithic", "requantization_source", "requires_device_loading",
             "supports_internal_mk", "mk_can_overlap_shared_experts", "moe_kernel"}  # fmt: skip


def test_what_vllm_033_asks_of_a_method_of_experts_is_there():
    """As its wheel has it (scripts/wheel_calls.py); vLLM 0.33 itself was not run."""
    assert {row["wheel"] for row in ASKED} == {"vllm-0.33.0"}
    names = {(row["of"], row["name"]) for row in ASKED}
    assert {("method", "apply"), ("kernel", "output_is_reduced")} <= names
    for row in ASKED:
        mine = {"method": plugin._Method, "kernel": exchange.Finished}[row["of"]]
        known = row["name"] in vars(mine)
        # topk_indices_dtype, which asks a kernel's prepare_finalize, is ours too.
        assert known or row["name"] in (*VLLMS_OWN, "prepare_finalize"), row
        if not known or "by_position" not in row:
            continue
        args = [None] * (1 + row["by_position"])  # self
        bound = inspect.signature(vars(mine)[row["name"]])
        bound.bind(*args, **dict.fromkeys(row["by_name"]))


def test_importing_megamoe_and_its_doors_imports_no_server():
    code = "import sys, megamoe.integrations.vllm.plugin, megamoe.integrations.sglang\n"
    code += "assert not {'vllm', 'sglang', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_entry_points_are_where_servers_look():
    import tomllib
    from importlib import import_module

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"]
    assert set(points) == {"vllm.general_plugins", "sglang.srt.plugins"}
    for group in points.values():
        module, _, name = group["megamoe"].partition(":")
        assert callable(getattr(import_module(module), name))
