"""Models of transformers with their experts run by us, beside the same models without."""

import gc
import sys
import weakref

import pytest
import torch

from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError
from megamoe.formats.spec import recipe_named
from megamoe.integrations import transformers as ours
from tests.integrations.models import CONFIGS, VERSION, experts, logits, model, prompt

pytestmark = pytest.mark.skipif(VERSION < (5, 0), reason="transformers 5 is not installed")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = recipe_named("bf16").tolerance


@pytest.fixture(autouse=True)
def registered():
    ours.register()
    ours.register("megamoe-w4a16", recipe="w4a16")


def error(y, wanted):
    return float((y.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_the_model_within_the_recipes_tolerance(family, device):
    made, ids = model(family, device=device), prompt(device)
    assert 0 < error(logits(made, "megamoe", ids), logits(made, "eager", ids)) < TOLERANCE


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_of_unit_gain_keep_float32_logits_within_a_hundredth(family):
    """As trained experts are; those that transformers initialises hardly add to the residual."""
    made, ids = model(family), prompt()
    for module in experts(made):
        rows = 1 if getattr(module, "is_transposed", False) else 2
        for w in (module.gate_up_proj, module.down_proj):
            torch.nn.init.normal_(w, std=w.shape[rows] ** -0.5)
    far = error(logits(made, "megamoe", ids), logits(made, "eager", ids))
    assert TOLERANCE < far < 1e-2
    module = experts(made)[-1]
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(40, 64, generator=rng)
    idx = torch.rand(40, module.num_experts, generator=rng).topk(2).indices
    weight = torch.rand(40, 2, generator=rng)
    with torch.no_grad():
        y = ours.experts_forward()(module, x, idx, weight)
        made.config._experts_implementation = "eager"
        assert error(y, module(x, idx, weight).double()) < 6e-3


@pytest.mark.skipif(
    VERSION < (5, 7),
    reason="transformers before 5.7 lets its own names alone through this door",
)
def test_the_name_is_taken_where_a_model_is_made():
    made, ids = model("qwen3"), prompt()
    wanted = logits(made, "megamoe", ids)
    made = model("qwen3", experts_implementation="megamoe")
    assert made.config._experts_implementation == "megamoe"
    assert torch.equal(logits(made, "megamoe", ids), wanted)
    made.set_experts_implementation("eager")
    assert not torch.equal(logits(made, "eager", ids), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_bf16_model_comes_as_close_to_the_float32_one_as_its_own_experts_do(family, device):
    made, ids = model(family, torch.bfloat16, device), prompt(device)
    exact = logits(made.float(), "eager", ids)
    made = made.bfloat16()
    # Of the middle token: a router that is undecided may send one to another expert in BF16.
    own, with_us = (
        float(((logits(made, name, ids) - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
        for name in ("eager", "megamoe")
    )
    assert with_us < 1.25 * own < 0.02


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_alone_are_closer_to_float64_than_eager_bf16_ones(family):
    module = experts(model(family, torch.bfloat16))[-1]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(40, 64, generator=rng).bfloat16()
    idx = torch.rand(40, module.num_experts, generator=rng).topk(2).indices
    weight = torch.rand(40, 2, generator=rng).bfloat16()
    with torch.no_grad():
        eager = module(x, idx, weight)
        y = ours.experts_forward()(module, x, idx, weight)
        exact = module.double()(x.double(), idx, weight.double())
    assert y.dtype == torch.bfloat16
    assert error(y, exact) < error(eager, exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CONFIGS)
def test_generation_says_the_same(family, device):
    made, ids = model(family, device=device), prompt(device)
    said = []
    for name in ("eager", "megamoe"):
        made.config._experts_implementation = name
        said.append(made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6,
                                  do_sample=False, pad_token_id=0))  # fmt: skip
    assert said[0].shape == (2, 23)
    last = 23 if device == "cpu" else 18  # a GPU's float32 sums may flip a later, undecided one
    assert torch.equal(*(tokens[:, :last] for tokens in said))


def test_a_quantised_recipe_is_the_model_with_quantised_experts():
    made, ids = model("qwen3"), prompt()
    y = logits(made, "megamoe-w4a16", ids)
    assert error(y, logits(made, "eager", ids)) > 0.01
    for module in experts(made):
        w13, w2 = ours.make_layer(module, 2, "w4a16").weights.dequantize()
        module.gate_up_proj.data, module.down_proj.data = w13, w2
    assert error(y, logits(made, "eager", ids)) < recipe_named("w4a16").tolerance


def call(forward, module, tokens=3):
    x = torch.ones(tokens, 64, dtype=torch.bfloat16)
    idx = torch.arange(2).repeat(tokens, 1)
    with torch.no_grad():
        return forward(module, x, idx, torch.full((tokens, 2), 0.5))


def change_in_place(module):
    with torch.no_grad():
        module.down_proj.mul_(2.0)


def replace_parameter(module):
    module.down_proj = torch.nn.Parameter(module.down_proj.detach() * 2.0)


def replace_data(module):
    module.down_proj.data = module.down_proj.data * 2.0


def change_through_data(module):
    module.down_proj.data.mul_(2.0)


def change_in_inference_mode(module):
    with torch.inference_mode():
        module.down_proj.data.mul_(2.0)


CHANGES = [change_in_place, replace_parameter, replace_data, change_through_data,
           change_in_inference_mode]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])  # shared with the model, and copied
def test_bf16_experts_follow_every_change(change, family):
    module, forward = experts(model(family, torch.bfloat16))[0], ours.experts_forward()
    with torch.no_grad():
        for name, t in module.named_parameters():
            if "bias" in name:
                t.zero_()
    before = call(forward, module)
    change(module)
    assert torch.equal(call(forward, module), before * 2) and bool(before.any())


def test_a_model_made_under_inference_mode_follows_too():
    with torch.inference_mode():
        module, forward = experts(model("qwen3"))[0], ours.experts_forward("w4a16")
        before = call(forward, module)
        module.down_proj.mul_(2.0)
        assert torch.equal(call(forward, module), before * 2)


@pytest.mark.parametrize("change", CHANGES)
def test_experts_are_made_once_and_anew_when_a_parameter_changes(change, monkeypatch):
    made = []
    monkeypatch.setattr(
        ours, "make_layer", lambda *a, make=ours.make_layer: made.append(make(*a)) or made[-1]
    )
    module, forward = experts(model("qwen3"))[0], ours.experts_forward("w4a16")
    before = call(forward, module)
    assert torch.equal(call(forward, module, 5)[:3], before) and len(made) == 1
    change(module)
    assert torch.equal(call(forward, module), before * 2) and len(made) == 2


def test_bf16_experts_are_not_held_twice():
    module = experts(model("qwen3", torch.bfloat16))[0]
    weights = ours.make_layer(module, 2, "bf16").weights
    assert weights.w13.data.data_ptr() == module.gate_up_proj.data_ptr()
    assert weights.w2.data.data_ptr() == module.down_proj.data_ptr()


def test_a_dropped_model_takes_its_experts_along():
    module, forward = experts(model("mixtral"))[0], ours.experts_forward()
    call(forward, module)
    seen = weakref.ref(module)
    del module
    gc.collect()
    assert seen() is None


def test_ids_past_the_last_expert_are_other_ranks_business():
    """Of a module with a part of its model's experts; in others they are refused."""
    module, forward = experts(model("mixtral"))[0], ours.experts_forward()
    for name in ("gate_up_proj", "down_proj"):
        setattr(module, name, torch.nn.Parameter(getattr(module, name)[:2]))
    x, weight = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(2, 2)
    with torch.no_grad():
        y = forward(module, x, torch.tensor([[1, 2], [2, 2]]), weight)
        one = forward(module, x, torch.tensor([[1, -1], [-1, -1]]), weight)
    assert torch.equal(y, one) and (y[1] == 0).all() and not (y[0] == 0).all()


class Stub(torch.nn.Module):
    def __init__(self, gate, **attributes):
        super().__init__()
        self._apply_gate = gate.__get__(self)
        self.__dict__ |= attributes


def clamped(self, x):
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def split_gpt_oss(self, x):
    gate, up = (h.clamp(max=self.swiglu_limit) for h in x.chunk(2, dim=-1))
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(min=-self.swiglu_limit) + 1)


def late_clamp(self, x):
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).clamp(max=2.0) * up


@pytest.mark.parametrize(
    ("act_fn", "activation"),
    [(torch.nn.GELU(), "geglu"), (torch.nn.GELU(approximate="tanh"), "geglu_tanh")],
)
def test_gelu_gates_are_run(act_fn, activation):
    module = experts(model("qwen3"))[0]
    module.act_fn = act_fn
    assert ours.gate_of(module).activation == activation
    rng = torch.Generator().manual_seed(0)
    x, idx = torch.randn(6, 64, generator=rng).bfloat16().float(), torch.arange(12).view(6, 2) % 8
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng).bfloat16() / 8)
        y = ours.experts_forward()(module, x, idx, torch.ones(6, 2))
        assert error(y, module(x, idx, torch.ones(6, 2)).double()) < 5e-3


def test_a_gate_is_known_by_what_it_computes():
    assert ours.gate_of(Stub(clamped, limit=10.0)) == ("split", "swiglu", 10.0)
    assert ours.gate_of(Stub(clamped, limit=300)) == ("split", "swiglu", 300.0)
    assert ours.gate_of(Stub(split_gpt_oss, swiglu_limit=7.0)) == ("split", "gpt_oss", None)
    assert ours.gate_of(experts(model("gpt_oss"))[0]) == ("interleaved", "gpt_oss", None)
    with pytest.raises(NotAvailable, match="another one in Stub"):
        ours.gate_of(Stub(late_clamp, limit=2.0))


def hidden_clamp(self, x):
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=30)) * up.clamp(-30, 30)


def test_clamps_are_found_wherever_they_are():
    assert ours.gate_of(Stub(clamped, limit=torch.tensor(40.0))) == ("split", "swiglu", 40.0)
    with pytest.raises(NotAvailable, match="another one in Stub"):
        ours.gate_of(Stub(hidden_clamp, most=30.0))


def count_layers(monkeypatch):
    made, make = [], ours.make_layer
    monkeypatch.setattr(
        ours, "make_layer", lambda *args, **how: made.append(1) or make(*args, **how)
    )
    return made


@pytest.mark.parametrize("is_taken", [False, True])
def test_another_gate_than_at_the_first_call_is_seen(is_taken, monkeypatch):
    module, forward = experts(model("qwen3"))[0], ours.experts_forward()
    module.gate_up_proj.data.normal_()
    module.bfloat16()
    call(forward, module)
    if is_taken:
        ours.Implementation(None, "auto").take(module, 2)
    module.act_fn = torch.nn.GELU()
    if is_taken:
        for _ in range(2):
            with pytest.raises(NotAvailable, match="run as they were taken; got another gate"):
                call(forward, module)
        return
    assert torch.equal(call(forward, module), call(ours.experts_forward(), module))
    made = count_layers(monkeypatch)
    for module.num_calls in range(3):  # nothing that a gate reads
        call(forward, module)
    assert not made
    module.act_fn = torch.nn.Mish()
    with pytest.raises(NotAvailable, match="must be one of swiglu"):
        call(forward, module)


@pytest.mark.parametrize("is_taken", [False, True])
def test_experts_that_are_trained_are_refused(is_taken):
    module, forward = experts(model("qwen3"))[0].bfloat16(), ours.experts_forward()
    if is_taken:
        ours.Implementation(None, "auto").take(module, 2)
    x, idx = torch.ones(3, 64, dtype=torch.bfloat16), torch.arange(2).repeat(3, 1)
    given = x, idx, torch.full((3, 2), 0.5)
    with pytest.raises(NotAvailable, match="experts' parameters must not require grad"):
        forward(module, *given)
    with torch.no_grad():
        wanted = forward(module, *given)
    if not is_taken:
        module.requires_grad_(False)
        assert torch.equal(forward(module, *given), wanted)


def test_memory_at_the_address_of_other_experts_is_not_theirs():
    module, forward = experts(model("qwen3"))[0], ours.experts_forward()
    call(forward, module)
    first = ours._places(module)
    storage = module.down_proj.untyped_storage()._cdata
    module.down_proj.data = module.down_proj.data.clone()
    assert ours._places(module) != first
    assert any(place[0].cdata == storage for place in first)  # held weakly: no other has its number


def quantised(dtype):
    module = experts(model("qwen3"))[0]
    for name in ("gate_up_proj", "down_proj"):
        t = getattr(module, name).detach().to(dtype)
        setattr(module, name, torch.nn.Parameter(t, requires_grad=False))
    return lambda: call(ours.experts_forward(), module)


def without_gate():
    module = experts(model("qwen3"))[0]
    module.has_gate = False
    ours.make_layer(module, 2, "bf16")


def other_activation():
    module = experts(model("qwen3"))[0]
    module.act_fn = torch.nn.Mish()
    ours.make_layer(module, 2, "bf16")


def with_gradient():
    made = model("qwen3")
    made.config._experts_implementation = "megamoe"
    made(prompt())


@pytest.mark.parametrize(
    ("use", "kind", "says"),
    [
        (lambda: ours.register(recipe="w5a5"), RangeError, "recipe must be one of"),
        (lambda: ours.register(backend="metal"), RangeError, "backend must be one of"),
        (lambda: quantised(torch.float8_e4m3fn)(), DTypeError, "scales would be left out"),
        (lambda: quantised(torch.int8)(), DTypeError, "quantised"),
        (without_gate, NotAvailable, "must have a gate"),
        (other_activation, NotAvailable, "must be one of swiglu"),
        (with_gradient, NotAvailable, "torch.no_grad"),
        (lambda: ours.make_layer(torch.nn.Linear(4, 4), 2, "bf16"), ShapeError, "gate_up_proj"),
    ],
)
def test_what_we_cannot_run_is_refused(use, kind, says):
    with pytest.raises(kind, match=says):
        use()


def test_a_missing_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(NotAvailable, match="pip install"):
        ours.register()
