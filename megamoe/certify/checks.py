"""The checks, in their order: each stage leans on those before it.

A check is a function that returns what it found in words, and raises Failed where that is wrong.
Nothing is timed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from megamoe import reference
from megamoe.certify import rules
from megamoe.certify.layers import (
    KNOWN_INTERMEDIATE,
    LONG_HIDDEN,
    known,
    known_hidden,
    random_experts,
    random_inputs,
)
from megamoe.certify.target import Sizes, Target, relative
from megamoe.formats.quantize import dequantize, quantize
from megamoe.formats.spec import FORMATS, Scale, recipe_named

ORACLE_BOUND = 2e-4  # of the oracle against the rules: a float64 sum may round to another FP32
SUM_BOUND = 2.0**-11  # of an adversarial sum's error, against the sum of its terms' sizes
STEP = 64  # launches of a soak between two looks
SOAK_TOKENS = (8, 3, 64, 17)


class Failed(Exception):
    """A check did not hold; the text says what was found."""


class Check(NamedTuple):
    """One check: `run()` says what it found, or raises."""

    stage: str
    name: str
    run: Callable[[], str]


# fmt: off
STAGES = {
    "oracle":   "the oracle of this installation against the rules in float64",
    "formats":  "every number format, bit for bit",
    "hardware": "what only this architecture has: its copies and products alone (Blackwell)",
    "products": "layers of small integers, whose results are known without an oracle",
    "sums":     "long sums that climb and cancel: how the tensor cores round",
    "gemms":    "from one row an expert to many: every tile of the tables",
    "layers":   "masks, repeats, skew, shared experts and options, in every mode",
    "bits":     "the same bits in every batch, order and mode",
    "graphs":   "replays of CUDA graphs, bit for bit",
    "ranks":    "several ranks in one launch, bit for bit",
    "waits":    "waits for what never comes end with a report",
    "soak":     "many launches, bit for bit",
}
# fmt: on


def all_checks(target: Target) -> Iterator[Check]:
    """Every check of a target, in order."""
    for recipe in target.recipes:
        yield Check("oracle", recipe, partial(_oracle, target, recipe))
    for name in FORMATS:
        yield Check("formats", name, partial(_format, target, name))
    sizes = target.sizes
    if target.is_gpu and target.backend == "blackwell":
        from megamoe.certify import blackwell_checks

        yield from blackwell_checks.all_checks(target)
    for recipe in target.recipes:
        for num in sizes.products:
            yield Check(
                "products", f"{recipe}, {num} tokens", partial(_product, target, recipe, num)
            )
    for recipe in target.recipes:
        yield Check("sums", f"{recipe}, {sizes.long_k} terms", partial(_sum, target, recipe))
    is_oracle = target.backend == "reference"  # which would be held against itself
    if not is_oracle:
        yield from _layers(target)
    for recipe in target.recipes:
        yield Check("bits", recipe, partial(_bits, target, recipe))
    if target.is_gpu and not is_oracle:
        from megamoe.certify import gpu_checks

        yield from gpu_checks.all_checks(target)
    if not is_oracle:
        for recipe in target.recipes:
            for mode in target.modes:
                name = f"{recipe}, {mode}, {sizes.num_soak} launches"
                yield Check("soak", name, partial(_soak, target, recipe, mode))


def _layers(target: Target) -> Iterator[Check]:
    """What is held against the oracle: tiles, then whole layers in every mode."""
    for recipe in target.recipes:
        for num in target.sizes.gemms:
            yield Check("gemms", f"{recipe}, {num} tokens", partial(_gemm, target, recipe, num))
    if target.is_gpu and target.backend == "blackwell":
        from megamoe.certify import grouped_checks

        yield from grouped_checks.all_checks(target)
    for recipe in target.recipes:
        for mode in target.modes:
            for case in CASES:
                name = f"{recipe}, {mode}, {case}"
                yield Check("layers", name, partial(_layer, target, recipe, mode, case))


def held(error: float, bound: float, what: str = "error") -> str:
    """The finding, or Failed: NaN never passes."""
    text = f"{what} {error:.2e} of {bound:.1e}" if bound else f"{what} {error:.2e}: bit for bit"
    if not error <= bound:
        raise Failed(text.replace(": bit for bit", ", not bit for bit"))
    return text


def _oracle(target: Target, recipe: str) -> str:
    """Against the rules on the CPU; on a GPU the same bits as there."""
    hidden, intermediate, num_experts, worst = 160, 96, 3, 0.0
    weights = random_experts(recipe, num_experts, hidden, intermediate)
    for seed, routing in enumerate(("masked", "repeated", "zipf")):
        inputs = random_inputs(4, num_experts, 2, hidden, routing, seed)
        y = reference.moe(*inputs, weights)
        x, idx, gates = (t.float().numpy() for t in inputs)
        wanted = rules.layer(x.astype("float64"), idx.astype(int), gates, weights)
        error = relative(y, torch.from_numpy(wanted))
        held(error, ORACLE_BOUND)
        worst = max(worst, error)
        if target.is_gpu and not torch.equal(target.wanted(inputs, weights), y):
            raise Failed(f"other bits on {target.device} than on the CPU")
    return held(worst, ORACLE_BOUND, "worst error")


def _format(target: Target, name: str) -> str:
    """Values of every size, zeros, ties and what is not finite: as on the CPU, or as the rules."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(256, 256, dtype=torch.float32, generator=rng) * 2.0 ** torch.randint(
        -40, 40, (256, 1), generator=rng
    )
    x[0], x[1, ::3] = 0.0, 0.0
    x[2] = torch.arange(256) / 4  # ties of every grid
    spec = FORMATS[name]
    if target.is_gpu:
        x[3, 5], x[4, 7] = float("nan"), float("inf")
        here, there = quantize(x, name), quantize(x.to(target.device), name)
        for part in ("data", "scale"):
            a, b = getattr(here, part), getattr(there, part)
            if a is not None and not torch.equal(_bytes(a), _bytes(b.cpu())):
                raise Failed(f"other bytes of {part} than on the CPU")
        return "the CPU's bytes"
    values = dequantize(quantize(x, name)).double()
    wanted = torch.from_numpy(rules.rounded(x.double().numpy(), spec))
    return held(relative(values, wanted), 0.0 if spec.scale is not Scale.FP32 else 1e-7)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """As stored, but for NaN in BF16 and FP32, whose sign and payload are the device's."""
    if t.dtype in (torch.bfloat16, torch.float32):
        t = torch.where(t.isnan(), torch.full_like(t, torch.nan), t)
    return t.view(torch.uint8)


def _product(target: Target, recipe: str, num_tokens: int) -> str:
    """A layer whose result is known: exact in every format of the recipe."""
    hidden = known_hidden(target.sizes.hidden)
    case = known(recipe, num_tokens, 2, hidden, KNOWN_INTERMEDIATE, is_long=False)
    error = relative(target.run(case.inputs, case.weights), case.y)
    return held(error, _exact_bound(target, recipe))


def _exact_bound(target: Target, recipe: str) -> float:
    """Bit for bit where scales are powers of two; FP32 scales are off by a last bit themselves.

    The interpreter truncates to BF16, so that there such a bit may become the last one of BF16.
    """
    if target.label == "interpreted":
        return 2.0**-7
    formats = recipe_named(recipe)
    is_power = {one.scale for one in (formats.weights, formats.acts)} <= {Scale.NONE, Scale.E8M0}
    return 0.0 if is_power else 1e-6


def _sum(target: Target, recipe: str) -> str:
    """Terms of one size that climb and cancel; what is off, in shares of all terms' sizes."""
    case = known(recipe, 8, 1, LONG_HIDDEN, target.sizes.long_k, is_long=True)
    off = (target.run(case.inputs, case.weights).double() - case.y.double()).abs()
    share = float((off / case.magnitude.clamp_min(1e-300)).max())
    return held(share, SUM_BOUND, "off by, of the sum of sizes,")


def _gemm(target: Target, recipe: str, num_tokens: int) -> str:
    """Both linears over few experts: more rows an expert, other tiles."""
    sizes, experts = target.sizes, 4
    weights = random_experts(recipe, experts, sizes.hidden, sizes.intermediate, seed=2)
    inputs = random_inputs(num_tokens, experts, 2, sizes.hidden, "uniform", seed=num_tokens)
    error = relative(target.run(inputs, weights), target.wanted(inputs, weights))
    return f"{held(error, target.bound(recipe))}{_tile(target, recipe, num_tokens)}"


def _tile(target: Target, recipe: str, num_tokens: int) -> str:
    """The tile that the planner takes there."""
    from megamoe.engine.planning import hardware_of
    from megamoe.planner.plan import plan
    from megamoe.problem import Problem

    if not target.is_gpu or target.backend == "reference":
        return ""
    sizes = target.sizes
    problem = Problem(num_tokens, sizes.hidden, sizes.intermediate, 4, 2, 1, recipe)
    chosen = plan(problem, hardware_of(target.device), backend=target.backend, mode="staged")
    return f"; tile {chosen.tile}"


# What a layer check varies: (routing, shared experts, options). Other than SwiGLU, with biases.
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "uniform": ("uniform", False, {}),
    "zipf, clamped": ("zipf", False, {"clamp": 0.5}),
    "masked, shared": ("masked", True, {}),
    "repeated, weight at combine": ("repeated", False, {"weight_at": "combine"}),
    "gpt-oss with biases": ("zipf", False, {"activation": "gpt_oss"}),
    "rows in fp8": ("uniform", False, {"combine": "fp8"}),
    "one expert": ("one", False, {}),
    "all masked": ("all_masked", False, {}),
}


def _layer(target: Target, recipe: str, mode: str, case: str) -> str:
    sizes = target.sizes
    routing, has_shared, options = CASES[case]
    shape = sizes.hidden, sizes.intermediate
    has_bias = options.get("activation", "swiglu") != "swiglu"
    weights = random_experts(recipe, sizes.num_experts, *shape, seed=3, has_bias=has_bias)
    shared = random_experts(recipe, 1, *shape, seed=4) if has_shared else None
    bound = target.bound(recipe) * (2 if options.get("combine") == "fp8" else 1)  # numerics.md
    worst, taken = 0.0, 0
    for num in sizes.layers:
        inputs = random_inputs(num, sizes.num_experts, sizes.top_k, sizes.hidden, routing, seed=num)
        if not target.takes(mode, inputs, weights, shared, **options):
            continue
        taken += 1
        got = target.run(inputs, weights, shared, mode, **options)
        error = relative(got, target.wanted(inputs, weights, shared, **options))
        worst = max(worst, error) if error == error else error
        held(error, bound)
    if not taken:
        return f"mode {mode} takes none of them, and says so"
    return held(worst, bound, f"{taken} sizes, worst error")


def num_of_bits(sizes: Sizes) -> int:
    """Tokens of the batch whose bits are looked at."""
    return max(sizes.layers[-1] // 4, 5)


def _bits(target: Target, recipe: str) -> str:
    """A token's bits depend neither on its batch nor on its place nor on the mode."""
    sizes, num = target.sizes, num_of_bits(target.sizes)
    weights = random_experts(recipe, sizes.num_experts, sizes.hidden, sizes.intermediate, seed=5)
    inputs = random_inputs(num, sizes.num_experts, sizes.top_k, sizes.hidden, "zipf", seed=6)
    whole = target.run(inputs, weights)
    backwards = target.run(tuple(t.flip(0) for t in inputs), weights)  # type: ignore[arg-type]
    if not torch.equal(backwards.flip(0), whole):
        raise Failed("other bits in the opposite order")
    for at in (0, num // 2, num - 1):
        alone = target.run(tuple(t[at : at + 1] for t in inputs), weights)  # type: ignore[arg-type]
        if not torch.equal(alone[0], whole[at]):
            raise Failed(f"token {at} has other bits alone than in a batch of {num}")
    x, idx, gates = inputs
    for mode in target.modes:
        size = num if target.takes(mode, inputs, weights) else max(num // 5, 5)
        few = x[:size], idx[:size], gates[:size]
        if not torch.equal(target.run(few, weights, mode=mode), whole[:size]):
            raise Failed(f"other bits {mode} than staged")
    spoiled = inputs[0].clone()
    spoiled[0, 0] = float("nan")
    rest = target.run((spoiled, *inputs[1:]), weights)[1:]
    if not torch.equal(rest, whole[1:]):
        raise Failed("a token with NaN changes its neighbours")
    return f"{num} tokens: reversed, alone, beside NaN; {', '.join(target.modes)}"


def _soak(target: Target, recipe: str, mode: str) -> str:
    """Launches of changing sizes, each bit for bit what the first of its kind gave."""
    sizes = target.sizes
    experts = random_experts(recipe, sizes.num_experts, sizes.hidden, sizes.intermediate, seed=7)
    weights, batches = experts.to(target.device), []
    for seed, num in enumerate(SOAK_TOKENS if target.is_gpu else (3, 2)):
        inputs = random_inputs(num, sizes.num_experts, sizes.top_k, sizes.hidden, "zipf", seed)
        if not target.takes(mode, inputs, experts):
            continue
        there = [t.to(target.device) for t in inputs]
        first = target.call(*there, weights, backend=target.backend, mode=mode)
        error = relative(first.cpu(), target.wanted(inputs, experts))
        held(error, target.bound(recipe))
        batches.append((there, first))
    if not batches:
        return f"mode {mode} takes none of them, and says so"
    wrong = torch.zeros((), dtype=torch.int64, device=target.device)
    for step in range(sizes.num_soak):
        there, first = batches[step * 3 % len(batches)]
        y = target.call(*there, weights, backend=target.backend, mode=mode)
        wrong += (y.view(torch.int16) != first.view(torch.int16)).any()
        if step % STEP == 0 and target.is_gpu:
            torch.cuda.synchronize(target.device)
    if int(wrong):
        raise Failed(f"{int(wrong)} of {sizes.num_soak} launches have other bits")
    return f"{sizes.num_soak} launches, {len(batches)} batches"
