"""transformers' expert parallelism (5.23 and newer) through our group: two processes over gloo."""

import pytest
import torch

from megamoe.errors import NotAvailable, RangeError
from megamoe.formats.spec import recipe_named
from megamoe.integrations import transformers as ours
from tests.distributed.ranks import launch
from tests.integrations.models import VERSION, experts, model, prompt

tf = pytest.importorskip("transformers")
E, K = 8, 2
needs_ep = pytest.mark.skipif(VERSION < (5, 23), reason="transformers 5.23 is not installed")


def inputs(num_tokens, hidden):
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(num_tokens, hidden, generator=rng)
    idx = torch.rand(num_tokens, E, generator=rng).topk(K).indices
    return x, idx, torch.rand(num_tokens, K, generator=rng)


def whole():
    return experts(model("qwen3"))[0]


def share_of(module, rank, num_ranks):
    """A module with one rank's experts, as `MoEParamShard` leaves it."""
    num = E // num_ranks
    for name in ("gate_up_proj", "down_proj"):
        part = getattr(module, name).data[rank * num : (rank + 1) * num].clone()
        setattr(module, name, torch.nn.Parameter(part, requires_grad=False))
    module.num_experts = num
    return module


def error(y, wanted):
    return float((y.double() - wanted.double()).norm() / wanted.double().norm())


def by_hand(rank, shares_batch):
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import EPImplementationInterface

    ours.register()
    both = init_device_mesh("cpu", (2,))
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    module = share_of(whole(), rank, 2)
    made = EPImplementationInterface()["megamoe"](module, both, both if shares_batch else alone)
    found = []
    with torch.no_grad():
        for num_tokens in (7, 1):
            x, idx, weights = inputs(num_tokens, module.gate_up_proj.shape[2])
            if not shares_batch:  # other batches, of other sizes
                x, idx, weights = (t[rank * 3 :] for t in (x, idx, weights))
            found.append(made(x, idx, weights))
        module.down_proj = torch.nn.Parameter(module.down_proj.data.clone(), requires_grad=False)
        try:
            made(x, idx, weights)
        except NotAvailable as refused:
            return [y.tolist() for y in found], str(refused)


@needs_ep
@pytest.mark.parametrize("shares_batch", [True, False])
def test_two_ranks_give_what_one_gives(shares_batch):
    ends = launch(2, by_hand, shares_batch, limit_s=120)
    assert [end.error for end in ends] == ["", ""]
    module = whole()
    with torch.no_grad():
        for which, num_tokens in enumerate((7, 1)):
            x, idx, weights = inputs(num_tokens, module.gate_up_proj.shape[2])
            wanted = ours.experts_forward()(module, x, idx, weights)
            for rank, end in enumerate(ends):
                y = torch.tensor(end.result[0][which])
                mine = wanted if shares_batch else wanted[rank * 3 :]
                assert torch.equal(y.view_as(mine), mine)
    assert all("other parameters on this rank" in end.result[1] for end in ends)


def by_transformers(rank, folder):
    from transformers.distributed import DistributedConfig

    ours.register()
    config = DistributedConfig(tp_size=2, ep_size=2, ep_implementation="megamoe")
    made = tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=config
    ).eval()
    ids = prompt()
    with torch.no_grad():
        y = made(ids, attention_mask=torch.ones_like(ids)).logits
    module = experts(made)[0]
    return y.tolist(), module.num_experts


@needs_ep
def test_a_model_of_from_pretrained_runs_over_two_ranks(tmp_path):
    pytest.importorskip("accelerate")
    made, ids = model("qwen3"), prompt()
    made.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = made(ids, attention_mask=torch.ones_like(ids)).logits
    ends = launch(2, by_transformers, tmp_path, limit_s=120)
    assert [end.error for end in ends] == ["", ""]
    for end in ends:
        logits, num_experts = end.result
        assert num_experts == E // 2
        assert 0 < error(torch.tensor(logits), wanted) < recipe_named("bf16").tolerance


@needs_ep
def test_transformers_own_names_of_ep_are_not_taken():
    with pytest.raises(RangeError, match="transformers' own"):
        ours.register("all_reduce")


def test_new_aliases_of_the_same_parameters_do_not_make_the_layer_anew(monkeypatch):
    """Under expert parallelism transformers gives local aliases, fresh in every call."""
    module, made = whole(), []
    real = ours.make_layer
    monkeypatch.setattr(ours, "make_layer", lambda *args: made.append(1) or real(*args))
    forward = ours.experts_forward()
    x, idx, weights = inputs(3, module.gate_up_proj.shape[2])
    tensors = {name: getattr(module, name).data for name in ("gate_up_proj", "down_proj")}
    with torch.no_grad():
        for _ in range(3):
            for name, t in tensors.items():
                module._parameters[name] = t.view_as(t)
            forward(module, x, idx, weights)
        assert len(made) == 1
        module._parameters["down_proj"] = tensors["down_proj"].clone()
        forward(module, x, idx, weights)
    assert len(made) == 2
