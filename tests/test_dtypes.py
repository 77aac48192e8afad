"""Every tensor that is made names its dtype: `torch.set_default_dtype` changes no result."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import megamoe as mm
from megamoe.distributed.wire import Wire
from megamoe.engine.shards import Shards
from megamoe.kernels.hopper.weights import pack
from megamoe.routing.samplers import SKEWS, even_routing, sample_routing
from tests.engine.pretended import E, H, I, K, tokens

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "megamoe").rglob("*.py"))
# Of these the default dtype is that of the result, whatever the arguments are.
FLOATS = {
    "empty", "zeros", "ones", "full", "rand", "randn", "normal", "linspace", "logspace", "eye",
    "scalar_tensor", "empty_strided", "hann_window",
}  # fmt: skip
BY_VALUE = {"tensor", "as_tensor", "arange"}  # of these where a float is among them


def of_default(node):
    """Whether a call makes a tensor of the default dtype."""
    func = node.func
    if not (isinstance(func, ast.Attribute) and ast.unparse(func.value) == "torch"):
        return False
    if any(keyword.arg in ("dtype", None) for keyword in node.keywords):
        return False
    if func.attr in BY_VALUE:
        values = [one for arg in node.args for one in ast.walk(arg)]
        return any(
            (isinstance(one, ast.Constant) and isinstance(one.value, float))
            or (isinstance(one, ast.Call) and ast.unparse(one.func) == "float")
            for one in values
        )
    return func.attr in FLOATS


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_is_made_names_its_dtype(path):
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [f"line {n.lineno}: {ast.unparse(n)}" for n in calls if of_default(n)]


@contextmanager
def default(dtype=None, device=None):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def results():
    """What a few calls compute, from floats that are the same in every run."""
    rng = torch.Generator("cpu").manual_seed(1)
    how = {"generator": rng, "dtype": torch.float32, "device": "cpu"}
    w13, w2 = torch.randn(E, 2 * I, H, **how), torch.randn(E, H, I, **how)
    x, idx, gates = torch.randn(5, H, **how).bfloat16(), *tokens(5)[1:]
    yield from (idx, gates, *even_routing(5, E, K, 4))
    for skew in SKEWS:
        yield from sample_routing(5, E, K, skew=skew, masked_ratio=0.2)
    for recipe in ("bf16", "w8a8", "w4a8_block", "nvfp4"):
        experts = mm.ExpertWeights.quantize(w13, w2, recipe, b13=w13[..., 0])
        yield from [t.clone() for t in experts.held().values()]
        yield mm.moe(x, idx, gates, experts, shared=experts[:1], activation="gpt_oss")
        layer = mm.MoE(experts, E, K, activation="gpt_oss")
        layer.refresh(w13=2 * w13)
        yield layer(x, idx, gates)
    ready = mm.quantize(x, "nvfp4", global_scale=0.0021)
    yield from ready.tensors().values()
    wire = Wire("nvfp4", H)
    yield wire.unpack(wire.pack(ready)).global_scale
    yield pack.pack(experts.w13, to_e4m3=False).factor
    yield from mm.route(x[:, :E].float(), mm.Router(E, K))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_no_result_depends_on_the_default_dtype(dtype):
    wanted = list(results())
    with default(dtype):
        for one, other in zip(results(), wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(
                one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
            )


def test_inputs_of_graphs_are_float32():
    from megamoe.kernels.portable.graph_io import Inputs

    with default(torch.bfloat16):
        inputs = Inputs.empty(2, H, K, torch.device("cpu"))
    assert inputs.topk_weights.dtype == torch.float32


def test_no_result_depends_on_the_default_device(tmp_path):
    wanted = list(results())
    save_file({"a": torch.arange(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with default(device="meta"):
        for one, other in zip(results(), wanted, strict=True):
            assert torch.equal(
                one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
            )
        assert Shards(tmp_path).read("a").tolist() == [0, 1, 2]
