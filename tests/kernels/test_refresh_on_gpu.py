"""A refresh whose experts lie on the layer's GPU: the interpreter runs its kernels on the CPU."""

import functools
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

import megamoe as mm
from megamoe.engine import images, packing
from megamoe.engine.fingerprint import Seal
from megamoe.engine.refresh import Refresh
from megamoe.errors import NotAvailable, RangeError
from tests.kernels.support import in_interpreter

pytestmark = in_interpreter()
E, I, H = 3, 64, 96
RECIPES = ("w4a8_block", "w4a16", "nvfp4", "w8a8", "bf16")
VIEWS = r"view|slice|select|detach|unflatten|alias"
WAITS = ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero")


@pytest.fixture(autouse=True)
def as_a_gpu(monkeypatch):
    monkeypatch.setattr(packing, "is_gpu", lambda device: True)
    packing.agrees.cache_clear()
    yield
    packing.agrees.cache_clear()


def floats(seed=0, num=E):
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(num, 2 * I, H, generator=rng).bfloat16()
    return w13, torch.randn(num, H, I, generator=rng).bfloat16()


def experts(recipe, seed=0, **extra):
    return mm.ExpertWeights.quantize(*floats(seed), recipe, **extra)


def held(recipe, is_packed=True, **extra):
    w = experts(recipe, **extra)
    if is_packed and images.is_image(w):
        images.hold(w)
    return w


def bits(w):
    return {n: t.reshape(-1).view(torch.uint8).tolist() for n, t in w.state_dict().items()}


def change(w, w13=None, w2=None, order=None, gate_up="split", b13=None, b2=None, is_group=False):
    one = Refresh.of(w, w13, w2, order, b13, b2, gate_up)
    if is_group:  # all ranks check before one writes
        one.check(w)
        one.write(w)
    else:
        one.apply(w)


class Waits(TorchFunctionMode):
    """Counts what a GPU's host would wait for."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in WAITS:
            self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


WAYS = [("format", None, True), ("floats", [2, 0], True), ("interleaved", None, True),
        ("format", [2, 0], False), ("floats", None, False)]  # fmt: skip
OTHERS = [("format", [2, 0], True), ("floats", None, True), ("interleaved", [2, 0], True),
          ("format", None, False), ("floats", [2, 0], False),
          ("interleaved", None, False)]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "order", "is_packed"),
    [*WAYS, *(pytest.param(*one, marks=pytest.mark.every) for one in OTHERS)],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_bit_is_that_of_quantize(recipe, given, order, is_packed):
    w = held(recipe, is_packed)
    addresses = [t.data_ptr() for t in w.held().values()]
    w13, w2 = floats(1, E if order is None else 2)
    gate_up = "interleaved" if given == "interleaved" and recipe != "w8a8" else "split"
    new = mm.ExpertWeights.quantize(w13, w2, recipe, gate_up=gate_up)
    wanted = (
        new if order is None else mm.ExpertWeights.cat([new[1:], experts(recipe)[1:2], new[:1]])
    )
    parts = (new.w13, new.w2) if given == "format" else (w13, w2)
    change(w, *parts, order, gate_up)
    assert bits(w) == bits(wanted)
    assert [t.data_ptr() for t in w.held().values()] == addresses


class Ops(TorchDispatchMode):
    """Counts torch's own operations."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("given", ["format", "floats"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rank_waits_once_and_launches_little(recipe, given, monkeypatch):
    """Whatever the number of experts: from floats too, and beside biases."""
    b13, b2 = torch.randn(E, 2 * I), torch.randn(E, H)
    w, new = experts(recipe, b13=b13, b2=b2), experts(recipe, 1)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "is_gpu", lambda device: False)
        if images.is_image(w):
            images.hold(w)
    parts = (new.w13, new.w2) if given == "format" else floats(1)
    launched = []

    def seen(kernel, grid):  # nothing is found, and nothing written
        launched.append(kernel.fn.__name__)
        return lambda **args: None

    monkeypatch.setattr(InterpretedFunction, "__getitem__", seen)
    monkeypatch.setattr(packing, "agrees", functools.cache(lambda *how: True))
    one = Refresh.of(w, *parts, None, None, None, "split")
    with Waits() as waits, Ops() as ops:
        one.apply(w)
    assert waits.seen == {"tolist": 1}
    assert len(launched) == (3 if (recipe, given) == ("w8a8", "floats") else 2), launched
    made = {name: num for name, num in ops.seen.items() if not re.search(VIEWS, name)}
    assert set(made) <= {"aten.zeros.default", "aten.empty.memory_format"}, made
    assert sum(made.values()) <= 2, "flags, and room for what is found"
    launched.clear()
    one = Refresh.of(w, *parts, None, b13, b2, "split")
    with Waits() as waits:
        one.apply(w)
    assert waits.seen == {"tolist": 1} and len(launched) <= 4
    one = Refresh.of(w, *parts, None, b13, b2, "split")
    for step in (one.check, one.write):  # over a group
        with Waits() as waits:
            step(w)
        assert waits.seen == {"tolist": 1}


def with_scale(w, name, code):
    part = getattr(w, name)
    scale = part.scale.clone()
    scale[1, ..., -1, 0] = code
    return replace(part, scale=scale)


def wide(t):
    t[1, 5, :32] *= 2.0**-20
    return t


NAN, LAST = float("nan"), torch.tensor(E - 1)
REFUSED = {
    "e8m0": ("w4a16", lambda w: {"w2": with_scale(w, "w2", 255)}, "NaN or Inf in expert 1"),
    "e4m3 scale": ("nvfp4", lambda w: {"w13": with_scale(w, "w13", NAN)}, "NaN or Inf in expert 1"),
    "fp32 scale": ("w8a8", lambda w: {"w13": with_scale(w, "w13", NAN)}, "NaN or Inf in expert 1"),
    "e4m3": (
        "w8a8",
        lambda w: {"w2": replace(w.w2, data=(w.w2.data.float() * NAN).to(w.w2.data.dtype))},
        "NaN or Inf in expert 0",
    ),
    "bf16": ("bf16", lambda w: {"w2": floats(1)[1].index_fill(0, LAST, NAN)}, "expert 2"),
    "floats": (
        "w4a8_block",
        lambda w: {"w13": floats(1)[0].index_fill(0, torch.tensor(1), NAN)},
        "NaN or Inf in expert 1",
    ),
    "floats of fp8": (
        "w8a8",
        lambda w: {"w2": floats(1)[1].index_fill(0, torch.tensor(1), NAN), "w13": floats(1)[0]},
        "NaN or Inf in expert 1",
    ),
    "floats of nvfp4": (
        "nvfp4",
        lambda w: {"w13": floats(1)[0].index_fill(2, LAST, float("inf"))},
        "NaN or Inf in expert 0",
    ),
    "octaves of floats": (
        "w4a8_block",
        lambda w: {"w2": wide(floats(1)[1]), "w13": floats(1)[0]},
        "w2 of expert 1 must have exponents of a row within 12 octaves",
    ),
    "global": (
        "nvfp4",
        lambda w: {"w13": replace(w.w13, global_scale=torch.tensor([1, NAN, 1]))},
        "global scales of w13 must be finite",
    ),
    "octaves": ("w4a8_block", lambda w: {"w2": with_scale(w, "w2", 90)}, "12 octaves"),
    "above 2": ("w4a16", lambda w: {"w2": with_scale(w, "w2", 140)}, "at most 2"),
    "bias": ("w4a16", lambda w: {"b13": torch.full((E, 2 * I), NAN)}, "b13 must be finite"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "is_group"),
    [*((case, False) for case in REFUSED), ("e4m3", True), ("octaves of floats", True)],
)
def test_what_is_refused_leaves_all_as_it_was(case, is_group):
    recipe, given, why = REFUSED[case]
    w = held(recipe, b13=torch.zeros(E, 2 * I))
    before, versions = bits(w), [t._version for t in w.held().values()]
    with pytest.raises((NotAvailable, RangeError), match=why):
        change(
            w, **({"w13": experts(recipe, 1).w13} | given(experts(recipe, 1))), is_group=is_group
        )
    assert bits(w) == before and versions == [t._version for t in w.held().values()]


@pytest.mark.parametrize("given", ["format", "floats"])
def test_writes_to_canonical_experts_are_counted(given):
    w, new = held("w8a8"), experts("w8a8", 1)
    seals = [Seal(list(part.tensors().values())) for part in (w.w13, w.w2)]
    change(w, w2=new.w2 if given == "format" else floats(1)[1])
    both = [list(part.tensors().values()) for part in (w.w13, w.w2)]
    assert [seal.holds(t) for seal, t in zip(seals, both, strict=True)] == [True, False]
    assert all(t._version > 0 for t in both[1])


@pytest.mark.parametrize("recipe", ["w4a8_block", "w4a16"])
@pytest.mark.parametrize("given", ["format", "floats"])
def test_groups_of_zeros_keep_their_scales(recipe, given):
    w, parts = held(recipe), floats(1)
    for t in parts:
        t[:, 3, :32], t[1, 5] = 0, 0
    new = mm.ExpertWeights.quantize(*parts, recipe)
    if given == "format":
        new.w13.scale[0, 0, 3, 0], new.w2.scale[2, 3, 0] = 3, 254
        new.w2.data[0, 3, :16] = 0x80
        parts = new.w13, new.w2
    change(w, *parts)
    assert bits(w) == bits(new)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_experts_are_nothing_to_do(recipe):
    w, new = held(recipe, b2=torch.zeros(E, H)), experts(recipe, 1)
    before = bits(w)
    change(w, new.w13[:0], floats(1)[1][:0], order=[], b2=torch.zeros(0, H))
    assert bits(w) == before


def test_tensors_that_kernels_cannot_read_take_the_long_way():
    w, new = held("nvfp4"), experts("nvfp4", 1)
    strided = replace(new.w13, data=new.w13.data.transpose(1, 2).contiguous().transpose(1, 2))
    inside = torch.cat((torch.zeros(1, dtype=torch.uint8), new.w2.data.flatten()))[1:]
    change(w, strided, replace(new.w2, data=inside.view_as(new.w2.data)))
    assert bits(w) == bits(new)
