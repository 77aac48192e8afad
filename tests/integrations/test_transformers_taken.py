"""Experts that the layer holds alone: one copy, brought back bit for bit, one node of a graph."""

import copy

import pytest
import torch

import megamoe as mm
from megamoe.engine import images
from megamoe.errors import NotAvailable, RangeError
from megamoe.integrations import transformers as ours
from tests.integrations.models import CONFIGS, VERSION, experts, logits, model, prompt
from tests.integrations.test_transformers_more import ODD, E, H, fp8_module

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(VERSION < (5, 7), reason="transformers 5.7 is not installed")
HERE = ours.Implementation(None, "reference")
KINDS = ["qwen3", "gpt_oss", "odd qwen3", "odd gpt_oss", "block", "ue8m0", "tensor", "fp4",
         "fp4 float"]  # fmt: skip


def module_of(kind, monkeypatch):
    if kind in ("block", "ue8m0", "tensor", "fp4", "fp4 float"):
        return fp8_module(kind)[0]
    family = kind.removeprefix("odd ")
    if family != kind:
        monkeypatch.setitem(CONFIGS, family, ODD[family])
    module = experts(model(family, torch.bfloat16))[0]
    with torch.no_grad():
        for name, t in module.named_parameters():
            if "bias" in name:
                t.normal_()
    return module


def inputs(module):
    rng = torch.Generator().manual_seed(5)
    transposed = getattr(module, "is_transposed", False)
    hidden = (
        H if not hasattr(module, "down_proj") else module.down_proj.shape[2 if transposed else 1]
    )
    x = torch.randn(7, hidden, generator=rng).bfloat16()
    idx = torch.rand(7, E, generator=rng).topk(2).indices
    return x, idx, torch.rand(7, 2, generator=rng)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_held_once_and_come_back_bit_for_bit(kind, monkeypatch):
    module = module_of(kind, monkeypatch)
    forward, given = ours.experts_forward(None, "reference"), inputs(module)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    objects = dict(module.named_parameters())
    with torch.no_grad():
        wanted = forward(module, *given)
        HERE.take(module, 2)
        assert torch.equal(forward(module, *given), wanted)
    assert not list(module.parameters()) and all(p.numel() == 0 for p in objects.values())
    for found in (module.state_dict(), {name: getattr(module, name) for name in before}):
        assert set(found) == set(before)
        assert all(same(found[name], t) for name, t in before.items())
    with torch.no_grad():  # a load goes into the layer
        module.load_state_dict({name: torch.zeros_like(t) for name, t in before.items()})
        assert not forward(module, *given).any() and not list(module.parameters())
        module.load_state_dict(before)
        assert torch.equal(forward(module, *given), wanted)
    assert ours.give_back(module) == 1
    assert all(module._parameters[name] is p for name, p in objects.items())
    assert all(same(p.detach(), before[name]) for name, p in objects.items())
    with torch.no_grad():
        assert torch.equal(forward(module, *given), wanted)


def test_images_bring_the_parameters_back_too():
    """As on a Hopper GPU, where nothing but images is held."""
    module, _ = fp8_module("fp4")
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    HERE.take(module, 2)
    layer = module.megamoe_taken.layer
    images.hold(layer.weights)
    assert layer.weights.is_packed
    assert all(same(getattr(module, name), t) for name, t in before.items())
    with torch.no_grad():
        module.gate_up_proj.add_(1)
    with pytest.raises(RangeError, match="copies, which nothing reads again"):
        ours.give_back(module)


def test_a_write_to_what_the_layer_reads_counts_and_one_to_a_copy_is_refused(monkeypatch):
    forward = ours.experts_forward(None, "reference")
    for kind in ("qwen3", "gpt_oss"):
        module = module_of(kind, monkeypatch)
        given = inputs(module)
        with torch.no_grad():
            HERE.take(module, 2)
            wanted = forward(module, *given) * 0
            module.down_proj.zero_()
            if kind == "qwen3":
                assert torch.equal(forward(module, *given), wanted)
                continue
            with pytest.raises(RangeError, match="copies, which nothing reads again"):
                forward(module, *given)


def test_a_model_saves_what_it_was_and_its_copies_answer_alike(tmp_path):
    made, ids = model("qwen3", torch.bfloat16), prompt()
    before = {name: t.clone() for name, t in made.state_dict().items()}
    ours.register()
    wanted = logits(made, "megamoe", ids)
    assert ours.use(made, take=True) == 2
    assert torch.equal(logits(made, "megamoe", ids), wanted)
    made.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    assert set(again.state_dict()) == set(before)
    assert all(torch.equal(t, before[name]) for name, t in again.state_dict().items())
    other = copy.deepcopy(made)
    del made
    assert torch.equal(logits(other, "megamoe", ids), wanted)
    eager = logits(other, "eager", ids)  # reads the properties
    assert 0 < float((eager - wanted).norm() / wanted.norm()) < 0.02
    assert ours.give_back(other) == 2 and ours.give_back(other) == 0


def test_a_copy_of_a_module_has_lent_nothing(monkeypatch):
    """References to what was lent have one owner: two of them would free the memory twice."""
    module, forward = module_of("gpt_oss", monkeypatch), ours.experts_forward(None, "reference")
    given = inputs(module)
    HERE.take(module, 2)
    lent = module.state_dict()
    other = copy.deepcopy(module)
    with torch.no_grad():
        assert torch.equal(forward(other, *given), forward(module, *given))
    assert module.megamoe_taken.lent and not other.megamoe_taken.lent
    assert all(same(other.state_dict()[name], t) for name, t in lent.items())


def test_a_model_is_taken_whole_or_not_at_all():
    made = model("qwen3", torch.bfloat16)
    found = experts(made)
    weight = found[1].gate_up_proj
    weight.data = weight.data.float() + 1e-3  # as BF16 it would be another
    with pytest.raises(NotAvailable, match="come back bit for bit"):
        ours.use(made, take=True)
    assert all(len(list(module.parameters())) == 2 for module in found)
    assert all(p.numel() for p in found[0].parameters())


REFUSED = {
    "float32": (lambda: HERE.take(experts(model("qwen3"))[0], 2), "come back bit for bit"),
    "another recipe": (
        lambda: ours.use(model("qwen3", torch.bfloat16), "megamoe-w8a8", recipe="w8a8", take=True),
        "which w8a8 rounds",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_come_back_is_not_taken(name):
    act, says = REFUSED[name]
    with pytest.raises(NotAvailable, match=says):
        act()


def test_taken_experts_are_for_inference_and_for_one_implementation():
    made = model("qwen3", torch.bfloat16)
    ours.use(made, take=True)
    with pytest.raises(NotAvailable, match=r"give_back\(model\)"):
        made.train()
    ours.register("megamoe-portable", backend="reference")
    with pytest.raises(NotAvailable, match="run as they were taken"):
        logits(made, "megamoe-portable", prompt())
    ours.give_back(made)
    made.train()


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "block", "tensor", "fp4"])
def test_taken_experts_are_one_node_of_a_compiled_graph(kind, monkeypatch):
    module = module_of(kind, monkeypatch)
    forward, given = ours.experts_forward(None, "reference"), inputs(module)
    with torch.no_grad():
        wanted = forward(module, *given)
        HERE.take(module, 2)
        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
        for num in (7, 3):
            y = compiled(module, *(t[:num] for t in given))
            assert torch.equal(y, wanted[:num])


def test_a_compiled_model_of_taken_experts_answers_as_before_and_others_break_the_graph():
    made, ids = model("qwen3", torch.bfloat16), prompt()
    ours.use(made)
    with torch.no_grad():
        loose = torch.compile(made, backend="aot_eager")(ids).logits
        assert torch.equal(loose, made(ids).logits)
        torch._dynamo.reset()
        ours.use(made, take=True)
        whole = torch.compile(made, fullgraph=True, backend="aot_eager")
        assert torch.equal(whole(ids).logits, loose)


@pytest.fixture
def cuda(monkeypatch):
    """A CPU that graphs take for a GPU."""
    from tests.engine import pretended, pretended_cuda

    sizes = {"hidden_size": pretended.H, "num_experts": pretended.E}
    assert pretended.K == 2
    monkeypatch.setitem(CONFIGS, "qwen3", lambda made=CONFIGS["qwen3"]: replace_in(made(), sizes))
    model("qwen3")  # transformers imports the rest of itself, which names torch.cuda.CUDAGraph
    return pretended_cuda.install(monkeypatch)


def replace_in(config, sizes):
    for name, size in sizes.items():
        setattr(config, name, size)
    return config


def ids_of(num):
    return torch.arange(num).remainder(128).view(2, -1)


def test_small_calls_of_a_model_are_replayed_with_the_same_bits(cuda):
    made = model("qwen3", torch.bfloat16)
    ours.use(made, take=True)
    wanted = {num: logits(made, "megamoe", ids_of(num)) for num in (2, 34, 140)}
    ours.give_back(made)
    assert cuda.log == ["eager"] * 6
    ours.use(made, take=True, cuda_graphs=True)
    for _ in range(2):  # captured, then replayed
        cuda.log.clear()
        for num in (2, 34):
            assert torch.equal(logits(made, "megamoe", ids_of(num)), wanted[num])
        captured = [line for line in cuda.log if line.startswith("capture")]
        assert "eager" not in cuda.log and len(captured) == (0 if _ else 4)
        assert len(set(captured)) <= 1  # one memory for the graphs of both layers
    assert torch.equal(logits(made, "megamoe", ids_of(140)), wanted[140])
    assert cuda.log == ["eager"] * 2  # prefill
    pools = [m.megamoe_taken.layer._graphs.pool for m in experts_taken(made)]
    assert pools[0] is pools[1] and pools[0].max_tokens == ours.GRAPH_TOKENS


def experts_taken(made):
    return [module for module in made.modules() if ours.TAKEN in module.__dict__]


def test_graphs_stay_with_experts_that_are_loaded_or_copied(cuda):
    made = model("qwen3", torch.bfloat16)
    ours.use(made, take=True, cuda_graphs=mm.GraphPool(16))
    before, ids = made.state_dict(), ids_of(4)
    wanted = logits(made, "megamoe", ids)
    made.load_state_dict(before)
    for one in (made, copy.deepcopy(made)):
        cuda.log.clear()
        assert torch.equal(logits(one, "megamoe", ids), wanted)
        assert "eager" not in cuda.log
        pools = {m.megamoe_taken.layer._graphs.pool for m in experts_taken(one)}
        assert len(pools) == 1 and pools.pop().max_tokens == 16


def test_graphs_are_refused_where_nothing_would_replay_them(cuda):
    made = model("qwen3", torch.bfloat16)
    with pytest.raises(NotAvailable, match="take=True, cuda_graphs=True"):
        ours.use(made, cuda_graphs=True)
    ours.use(made, take=True)
    with pytest.raises(NotAvailable, match=r"cuda_graphs now, .* they had none; give_back"):
        ours.use(made, take=True, cuda_graphs=True)
    ours.give_back(made)
    for _ in range(2):
        ours.use(made, take=True, cuda_graphs=True)
    with pytest.raises(NotAvailable, match=r"of 16 tokens where they had 128; give_back"):
        ours.use(made, take=True, cuda_graphs=mm.GraphPool(16))


def test_ids_are_masked_only_where_they_may_be_of_other_ranks():
    """Under transformers' expert parallelism a module has fewer experts than its config says."""
    whole, part = (experts(model("qwen3", torch.bfloat16))[0] for _ in range(2))
    for name in ("gate_up_proj", "down_proj"):
        setattr(part, name, torch.nn.Parameter(getattr(part, name)[:4]))
    x, idx, weights = inputs(whole)
    forward = ours.experts_forward(None, "reference")
    with torch.no_grad():
        HERE.take(whole, 2)
        assert not whole.megamoe_taken.masks
        here = torch.where(idx < 4, idx, 4)  # ids past the last are other ranks'
        wanted = forward(whole, x, idx.masked_fill(idx >= 4, -1), weights)
        assert torch.equal(forward(part, x, here, weights), wanted)
        HERE.take(part, 2)
        assert part.megamoe_taken.masks
        assert torch.equal(forward(part, x, here, weights), wanted)
        with pytest.raises(RangeError):  # never taken for another rank's in a whole module
            forward(whole, x, idx.masked_fill(idx == 0, 8), weights)
            whole.megamoe_taken.layer.check()


@pytest.mark.gpu
def test_a_model_on_a_gpu_replays_with_the_bits_of_eager_calls():
    made = model("qwen3", torch.bfloat16, "cuda")
    texts = [ids_of(num).cuda() for num in (2, 34, 140, 2)]
    ours.use(made, take=True)
    wanted = [logits(made, "megamoe", ids) for ids in texts]
    ours.give_back(made)
    ours.use(made, take=True, cuda_graphs=True)
    for _ in range(2):
        for ids, want in zip(texts, wanted, strict=True):
            assert torch.equal(logits(made, "megamoe", ids), want)
