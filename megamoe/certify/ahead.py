"""What layers of the checks launch, compiled before them in several processes.

One after the other the kernels of Hopper's checks take many minutes to compile. They are found
without launching (`engine/recording.py`); what is not found here is compiled by the check that
launches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megamoe.certify.checks import CASES, SOAK_TOKENS, num_of_bits
from megamoe.certify.gpu_checks import COUNTS, RANKS, WAIT_TOKENS, tokens_of_rank
from megamoe.certify.layers import KNOWN_INTERMEDIATE, LONG_HIDDEN, known_hidden
from megamoe.certify.target import Target
from megamoe.engine.planning import OWN_LAUNCHES, hardware_of, log_once
from megamoe.errors import MegaMoEError
from megamoe.formats.spec import recipe_named
from megamoe.planner.call import SharedSpec
from megamoe.problem import Options

if TYPE_CHECKING:
    from megamoe.engine.recording import LayerSpec, Work


def compile_ahead(
    target: Target, progress: Callable[[int, int], None], processes: int | None = None
) -> None:
    """Fill the disk cache; where that fails, checks compile by themselves."""
    if target.backend == "reference":
        return
    from megamoe.engine.precompile import compile_layers

    try:
        compile_layers(works_of(target), processes=processes, progress=progress)
    except (MegaMoEError, OSError) as error:
        log_once(f"kernels are compiled one after the other: {error}")


def works_of(target: Target) -> list[Work]:
    """Layers of the checks, and the tokens of their calls."""
    sizes: dict[LayerSpec, dict[int, None]] = {}
    for layer, num in _calls(target):
        if _takes(layer, num):
            sizes.setdefault(layer, {})[num] = None
    return [(layer, list(tokens)) for layer, tokens in sizes.items()]


def _takes(layer: LayerSpec, num: int) -> bool:
    """Whether the layer's mode takes such a call; fused launches refuse some by name."""
    try:
        layer.plan(num)
    except MegaMoEError:
        return False
    return True


def _calls(target: Target) -> Iterator[tuple[LayerSpec, int]]:
    """Every call of the checks from `products` on: its layer, and its tokens."""
    sizes = target.sizes
    whole = sizes.hidden, sizes.intermediate, sizes.num_experts, sizes.top_k
    for recipe in target.recipes:
        hidden = known_hidden(sizes.hidden)
        small = _layer(target, recipe, hidden, KNOWN_INTERMEDIATE, 2, 1, mode="staged")
        yield from ((small, num) for num in sizes.products)
        yield _layer(target, recipe, LONG_HIDDEN, sizes.long_k, 1, 1, mode="staged"), 8
        few = _layer(target, recipe, *whole[:2], 4, 2, mode="staged")
        yield from ((few, num) for num in sizes.gemms)
        for mode in target.modes:
            for _, has_shared, options in CASES.values():
                layer = _layer(
                    target, recipe, *whole, mode=mode, options=options, has_shared=has_shared
                )
                yield from ((layer, num) for num in sizes.layers)
            plain = _layer(target, recipe, *whole, mode=mode)
            num = num_of_bits(sizes)
            yield from ((plain, one) for one in (num, 1, max(num // 5, 5), *SOAK_TOKENS))
        replayed = _layer(target, recipe, *whole, mode="auto", graphs=True)
        yield from ((replayed, num) for num in COUNTS)
        if "fused" not in target.modes:
            continue
        yield _layer(target, recipe, *whole, mode="fused"), WAIT_TOKENS
        staged = _layer(target, recipe, *whole, mode="staged")
        for num in RANKS:
            tokens = [tokens_of_rank(rank) for rank in range(num)]
            yield staged, sum(tokens)
            yield _layer(target, recipe, *whole, mode="fused", ranks=num), max(tokens)
        if target.backend == "blackwell":
            tokens = [tokens_of_rank(rank) for rank in range(RANKS[0])]
            chain = _layer(target, recipe, *whole, mode="chain", ranks=RANKS[0])
            yield from ((replace(chain, max_tokens=max(tokens)), num) for num in tokens)


def _layer(
    target: Target,
    recipe: str,
    *sizes: int,
    mode: str,
    options: dict[str, Any] | None = None,
    has_shared: bool = False,
    graphs: bool = False,
    ranks: int = 1,
) -> LayerSpec:
    """Hidden, intermediate, experts, top_k; random weights fit each recipe's fastest image."""
    from megamoe.engine.recording import LayerSpec

    hidden, intermediate, num_experts, top_k = sizes
    machine, chosen = hardware_of(target.device), options or {}
    shared = None
    if has_shared:
        is_joined = target.backend == "hopper" and recipe_named(recipe).weights.name == "mxfp4"
        apart = "" if is_joined else OWN_LAUNCHES
        shared = SharedSpec(1, recipe, intermediate, True, apart)
    return LayerSpec(
        recipe, hidden, intermediate, num_experts, top_k,
        (machine.label, machine.num_sms, machine.arch, machine.hbm_bytes),
        num_ranks=ranks, local_ranks=ranks, options=Options(**chosen),
        has_bias=chosen.get("activation", "swiglu") != "swiglu", shared=shared, graphs=graphs,
        id_bits=(64,), has_stats=graphs or ranks > 1,
        overrides=(("backend", target.backend), ("mode", mode)),
    )  # fmt: skip
