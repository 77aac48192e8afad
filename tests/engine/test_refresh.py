"""layer.refresh: other values at the same addresses, all of them or none."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import megamoe as mm
from megamoe.engine import checkpoint, images, packing, refresh, refresh_on_gpu
from megamoe.errors import NotAvailable, RangeError, ShapeError
from megamoe.formats.quantized import Quantized, empty
from megamoe.formats.spec import MXFP4
from megamoe.kernels.hopper.weights import pack
from megamoe.planner.numerics import HOPPER_RECIPES
from megamoe.problem import RECIPES
from tests.engine.pretended import E, H, I, K, tokens, weights


def floats(num=E, seed=7):
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(num, 2 * I, H, generator=rng).bfloat16()
    return w13, torch.randn(num, H, I, generator=rng).bfloat16()


def layer_of(recipe="w4a8_block", backend="hopper", **extra):
    w = mm.ExpertWeights.quantize(*floats(seed=0), recipe, **extra)
    return mm.MoE(w, E, K, backend=backend)


def addresses(layer):
    return [t.data_ptr() for t in layer.experts.buffers()]


def bits(w):
    return {name: t.reshape(-1).view(torch.uint8).tolist() for name, t in w.state_dict().items()}


@pytest.mark.parametrize(
    "recipe, backend",
    [*((recipe, "hopper") for recipe in HOPPER_RECIPES), *((r, "reference") for r in RECIPES)],
)
def test_every_expert_is_written_where_it_lies(gpu, recipe, backend):
    layer = layer_of(recipe, backend)
    held = addresses(layer)
    layer.refresh(*floats())
    assert addresses(layer) == held
    assert bits(layer.weights) == bits(mm.ExpertWeights.quantize(*floats(), recipe))
    assert layer.weights.is_packed == (backend == "hopper" and "4" in recipe)


ALIASES = {  # of a layer's own experts, given back: (recipe, what is given, experts)
    "others' places": ("w8a8", lambda w: {"w13": w.w13[1:3]}, [0, 1]),
    "two places": ("w8a8", lambda w: {"w2": w.w2[:2]}, [1, 0]),
    "an image": ("w4a8_block", lambda w: {"w2": w.w2[:2]}, [1, 0]),
    "floats": ("bf16", lambda w: {"w2": w.w2.data[1:3]}, [0, 1]),
    "scales alone": (
        "w8a8", lambda w: {"w2": replace(w.w2[:2], data=w.w2.data[:2].clone())}, [1, 2]
    ),
    "biases": ("w8a8", lambda w: {"b2": w.b2[1:3]}, [0, 1]),
    "the other matrix": (
        "bf16",
        lambda w: {"w13": torch.randn(1, 2 * I, H).bfloat16(),
                   "w2": w.w13.data[0].flatten()[: H * I].view(1, H, I)},
        [0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ALIASES)
def test_experts_in_the_memory_that_is_written_are_refused(gpu, case):
    recipe, given, order = ALIASES[case]
    layer = layer_of(recipe, b2=torch.randn(E, H))
    before = bits(layer.weights)
    with pytest.raises(RangeError, match="must not lie in the memory that is written"):
        layer.refresh(**given(layer.weights), experts=order)
    assert bits(layer.weights) == before


def test_a_refresh_in_a_capture_is_refused_before_a_launch(gpu, monkeypatch):
    layer = layer_of("w8a8")
    before = bits(layer.weights)
    monkeypatch.setattr(refresh, "is_capturing", lambda device: True)
    with pytest.raises(NotAvailable, match="a refresh must not be captured"):
        layer.refresh(*floats())
    assert bits(layer.weights) == before


def test_experts_of_more_values_than_kernels_count_take_the_long_way():
    for rows, can in ((1 << 16, False), (1 << 15, True)):
        held = empty((2, rows, 1 << 15), MXFP4, "meta")
        source = torch.empty(2, rows, 1 << 15, dtype=torch.bfloat16, device="meta")
        assert refresh_on_gpu._can(source, held, 2, is_interleaved=False) == can


@pytest.mark.parametrize("recipe", ["w4a8_block", "w8a8", "bf16"])
def test_experts_where_they_go_or_apart_are_written(gpu, recipe):
    layer = layer_of(recipe)
    before = bits(layer.weights)
    layer.refresh(layer.weights.w13, layer.weights.w2)
    layer.refresh(layer.weights.w13[2:4], experts=[2, 3])
    layer.refresh(layer.weights.w13[1:2], experts=[1])
    assert bits(layer.weights) == before


@pytest.mark.parametrize("recipe", ["w4a8_block", "nvfp4", "w8a8"])
def test_some_experts_are_written_in_any_order_and_the_others_stay(gpu, recipe):
    layer, (w13, w2) = layer_of(recipe), floats(2)
    layer.refresh(w13, w2, experts=[5, 1])
    wanted = [mm.ExpertWeights.quantize(*floats(seed=0), recipe)[e : e + 1] for e in range(E)]
    new = mm.ExpertWeights.quantize(w13, w2, recipe)
    wanted[5], wanted[1] = new[:1], new[1:]
    assert bits(layer.weights) == bits(mm.ExpertWeights.cat(wanted))


def test_quantised_tensors_keep_every_bit_and_one_matrix_may_stay(gpu):
    layer, new = layer_of("w4a16"), mm.ExpertWeights.quantize(*floats(), "w4a16")
    new.w2.data[:, 0, :16], new.w2.scale[:, 0, 0] = 0x80, 3  # a group of -0
    layer.refresh(w2=new.w2)
    old = mm.ExpertWeights.quantize(*floats(seed=0), "w4a16")
    assert bits(layer.weights) == bits(mm.ExpertWeights("w4a16", old.w13, new.w2))


def test_biases_and_interleaved_rows(gpu):
    rng = torch.Generator().manual_seed(3)
    b13, b2 = torch.randn(E, 2 * I, generator=rng), torch.randn(E, H, generator=rng)
    extra = {"b13": b13, "b2": b2, "gate_up": "interleaved"}
    layer = layer_of("w4a16", b13=b13 + 1, b2=b2 + 1)
    held = addresses(layer)
    layer.refresh(*floats(), **extra)
    assert addresses(layer) == held
    assert bits(layer.weights) == bits(mm.ExpertWeights.quantize(*floats(), "w4a16", **extra))


def lowered(recipe, code):
    """Quantised experts of which the last has a scale of this code."""
    w = mm.ExpertWeights.quantize(*floats(), recipe)
    w.w2.scale[-1, -1, -1] = code
    return w


def scaled(factors):
    """NVFP4's w13 with other global scales."""
    return replace(mm.ExpertWeights.quantize(*floats(), "nvfp4").w13, global_scale=factors)


REFUSED = {
    "exponents": ("w4a8_block", lambda: {"w2": lowered("w4a8_block", 90).w2}, "12 octaves"),
    "above 2": ("w4a16", lambda: {"w2": lowered("w4a16", 140).w2}, "at most 2"),
    "nan": (
        "w4a8",
        lambda: {"w13": floats()[0].index_fill(0, torch.tensor([7]), torch.nan)},
        "fin",
    ),
    "shape": ("w4a8", lambda: {"w13": floats()[0][:, :-2]}, r"w13 must be \(8, 128, 96\)"),
    "number": ("w4a8", lambda: {"w2": floats()[1], "experts": [1]}, r"w13 must be \(1, 128, 96\)"),
    "format": ("w4a8", lambda: {"w2": lowered("nvfp4", 1.0).w2}, "Quantized in mxfp4"),
    "gate and up": ("nvfp4", lambda: {"w13": scaled(torch.ones(E, 2))}, r"got \(8, 2\)"),
    "one for all": ("nvfp4", lambda: {"w13": scaled(torch.ones(()))}, r"got \(\) for"),
    "global nan": ("nvfp4", lambda: {"w13": scaled(torch.full((E,), torch.nan))}, "finite"),
    "twice": ("w4a8", lambda: {"w2": floats(2)[1], "experts": [1, 1]}, "different local ones"),
    "bias": ("w4a8", lambda: {"b2": torch.zeros(E, H)}, "where the layer has it"),
    "shared": ("w4a8", lambda: {"w2": floats()[1], "shared": True}, "must have shared"),
    "nothing": ("w4a8", lambda: {"w13": None}, "something to write"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_is_refused_before_anything_is(gpu, case):
    recipe, given, why = REFUSED[case]
    for backend in ("hopper", "reference") if recipe == "nvfp4" else ("hopper",):
        layer = layer_of(recipe, backend)
        before = bits(layer.weights)
        with pytest.raises((NotAvailable, RangeError, ShapeError, TypeError), match=why):
            layer.refresh(**{"w13": floats()[0]} | given())
        assert bits(layer.weights) == before


def test_values_with_which_the_next_call_would_pack_other_images_are_refused(gpu):
    wide = lowered("w4a8_block", 90)
    layer = mm.MoE(wide, E, K, backend="hopper")
    before, held = bits(layer.weights), addresses(layer)
    with pytest.raises(NotAvailable, match="build the layer anew"):
        layer.refresh(*floats())
    assert bits(layer.weights) == before
    layer.refresh(floats(seed=8)[0], lowered("w4a8_block", 80).w2)  # the last expert is wide still
    images.prepared(layer.weights)
    assert addresses(layer) == held == [t.data_ptr() for t in layer.weights.held().values()]


def test_a_refusal_that_is_kept_leaves_gradients_on(gpu):
    layer = layer_of("w4a8")
    with pytest.raises(RangeError) as kept:  # with its frames
        layer.refresh(floats()[0].index_fill(0, torch.tensor([3]), torch.nan))
    assert torch.is_grad_enabled() and kept.value is not None


@pytest.mark.parametrize("backend", ["hopper", "reference"])
def test_biases_that_were_made_under_inference_mode_are_written(gpu, backend):
    with torch.inference_mode():
        layer = layer_of("w4a16", backend, b13=torch.zeros(E, 2 * I), b2=torch.zeros(E, H))
    extra = {"b13": torch.ones(E, 2 * I), "b2": torch.ones(E, H)}
    layer.refresh(*floats(), **extra)
    assert bits(layer.weights) == bits(mm.ExpertWeights.quantize(*floats(), "w4a16", **extra))


def test_what_it_was_packed_from_is_no_longer_looked_at(gpu):
    w = mm.ExpertWeights.quantize(*floats(seed=0), "w4a16")
    mine = w.w2.data
    layer = mm.MoE(w, E, K, backend="hopper")
    layer.refresh(*floats())
    mine.zero_()
    layer.plan(8)
    assert bits(layer.weights) == bits(mm.ExpertWeights.quantize(*floats(), "w4a16"))


def test_shared_experts_are_written_too(gpu):
    w, shared = (mm.ExpertWeights.quantize(*floats(seed=s), "w4a16") for s in (0, 1))
    layer = mm.MoE(w, E, K, backend="hopper", shared=shared[:1])
    w13, w2 = floats(1)
    layer.refresh(w13, w2, shared=True)
    assert bits(layer.shared.weights) == bits(mm.ExpertWeights.quantize(w13, w2, "w4a16"))
    assert bits(layer.weights) == bits(mm.ExpertWeights.quantize(*floats(seed=0), "w4a16"))


def test_graphs_stay_and_read_the_new_values(cuda):
    layer = mm.MoE(weights(), E, K, cuda_graphs=True)
    before = layer(*tokens(4))
    layer.refresh(*floats())
    after = layer(*tokens(4))
    assert sum(line.startswith("capture") for line in cuda.log) == 1
    new = mm.ExpertWeights.quantize(*floats(), "w4a8")
    assert torch.equal(after, mm.moe(*tokens(4), new, backend="reference"))
    assert not torch.equal(after, before)


def test_over_a_group_one_ranks_refusal_is_everyones(gpu):
    layer = layer_of("w4a16")
    before, steps = bits(layer.weights), []

    def gather(step, make):
        steps.append(step)
        make()
        raise RangeError("rank 1, step refresh: w2 must be finite")

    layer._world = SimpleNamespace(rendezvous=SimpleNamespace(gather=gather))
    with pytest.raises(RangeError, match="rank 1"):
        layer.refresh(*floats())
    assert steps == ["refresh"] and bits(layer.weights) == before


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["w4a8_block", "w4a16", "nvfp4", "w8a8"])
def test_on_a_gpu_a_captured_graph_gives_the_new_bits(recipe):
    hidden, wide = 512, 256
    rng = torch.Generator(device="cuda").manual_seed(0)

    def some():
        w13 = torch.randn(E, 2 * wide, hidden, generator=rng, device="cuda") / hidden**0.5
        return w13, torch.randn(E, hidden, wide, generator=rng, device="cuda") / wide**0.5

    layer = mm.MoE(mm.ExpertWeights.quantize(*some(), recipe), E, K)
    x = torch.randn(16, hidden, generator=rng, device="cuda").bfloat16()
    idx = torch.arange(32, device="cuda").remainder(E).view(16, K)
    gates = torch.full((16, K), 0.5, device="cuda")
    layer(x, idx, gates)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, idx, gates)
    held, new = addresses(layer), some()
    one = sum(t.nbytes for t in new) // E
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer.refresh(*new)
    assert torch.cuda.max_memory_allocated() - before < 8 * one  # of FP32, temporaries among it
    graph.replay()
    torch.cuda.synchronize()
    wanted = mm.MoE(mm.ExpertWeights.quantize(*new, recipe), E, K)(x, idx, gates)
    assert torch.equal(y, wanted) and addresses(layer) == held
    layer.check()


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["format", "floats"])
@pytest.mark.parametrize("recipe", ["w4a8_block", "w4a16", "nvfp4", "w8a8", "bf16"])
def test_on_a_gpu_what_is_refused_leaves_every_bit(recipe, given):
    """What writes is queued before the host knows: a NaN anywhere in w2 keeps w13 too."""
    w = mm.ExpertWeights.quantize(*(t.cuda() for t in floats()), recipe)
    layer = mm.MoE(w, E, K)
    before = bits(layer.weights)
    parts = [t.cuda() for t in floats(seed=9)]
    if given == "format":
        new = mm.ExpertWeights.quantize(*parts, recipe)
        parts = [new.w13, new.w2]
        last = new.w2.data if new.w2.scale is None else new.w2.scale
        last[-1].view(torch.uint8).fill_(0xFF)  # NaN in every format
    else:
        parts[1][-1, -1, -1] = torch.nan
    with pytest.raises(RangeError, match=f"w2 must be finite; got NaN or Inf in expert {E - 1}"):
        layer.refresh(*parts)
    assert bits(layer.weights) == before
    layer.refresh(*(t.cuda() for t in floats(seed=10)))
    assert bits(layer.weights) == bits(mm.ExpertWeights.quantize(*floats(seed=10), recipe))


def test_a_quantised_matrix_may_be_a_part_of_another(gpu):
    layer, new = layer_of("w4a16"), mm.ExpertWeights.quantize(*floats(), "w4a16")
    part = new.w2[2:4]
    assert isinstance(part, Quantized)
    layer.refresh(w2=part, experts=[2, 3])
    assert torch.equal(layer.weights.w2[2].data, new.w2[2].data)


@pytest.mark.parametrize("recipe", ["w4a8", "nvfp4"])
def test_what_scales_alone_say_of_an_expert_is_true_of_its_values(recipe):
    w = weights(recipe).w13
    scale = w.scale.view(torch.uint8)
    for expert, code in enumerate((0, 1, 129, 127, 254, 255, 120)):
        scale[expert, 0, 0, 0] = code
    w.data[6] = 0
    said = packing.facts_by_scales(w)
    assert {facts is None for facts in said} == {True, False} and said[5] is None
    for expert, facts in enumerate(said):
        if facts is not None:
            assert facts == pack.facts_of(w[expert : expert + 1])
            checkpoint.refuse_nan(w[expert : expert + 1], "w13")


def test_experts_that_two_layers_have_are_not_written():
    """The other's results would change; so would those of slices of the same experts."""
    w13, w2 = torch.randn(4, 128, 64).bfloat16(), torch.randn(4, 64, 64).bfloat16()
    w = mm.ExpertWeights.quantize(w13, w2, "w8a8")
    one, other = mm.MoE(w, 4, 2), mm.MoE(w[:2], 2, 2)
    before = {name: t.clone() for name, t in w.state_dict().items()}
    for layer in (one, other):
        with pytest.raises(mm.NotAvailable, match="must belong to one layer"):
            layer.refresh(w13=2 * w13[: layer.weights.num_experts])
    bits = {name: (t.view(torch.uint8), before[name].view(torch.uint8))
            for name, t in w.state_dict().items()}  # fmt: skip
    assert all(torch.equal(*pair) for pair in bits.values())
    del other, layer
    one.refresh(w13=2 * w13)
    assert one.weights.w13.data.data_ptr() == w.w13.data.data_ptr()  # what it was built from
    apart = mm.MoE(w.take(range(4)), 4, 2)
    apart.refresh(w13=w13)
    one.refresh(w13=w13)


def test_a_layer_that_is_gone_or_lies_beside_keeps_nobody_from_writing():
    """In a cycle until the collector comes; slices of one tensor; a factor that is not written."""
    both = torch.randn(4, 2, 128, 64).bfloat16(), torch.randn(4, 2, 64, 64).bfloat16()
    apart = [
        mm.ExpertWeights.from_quantized(both[0][:, i], None, both[1][:, i], None, recipe="bf16")
        for i in range(2)
    ]
    one, other = (mm.MoE(w, 4, 2) for w in apart)
    one.refresh(w13=torch.ones(4, 128, 64))
    assert not other.weights.w13.data.eq(1).all()
    gone = mm.MoE(apart[0], 4, 2)
    gone.me = [gone]
    del gone
    one.refresh(w13=torch.zeros(4, 128, 64))
