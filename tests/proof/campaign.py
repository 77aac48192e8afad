"""Which launches are explored, and who finds a planted bug."""

import functools

from tests.emulator import mutate
from tests.emulator.exploring import is_found
from tests.proof import targets
from tests.proof.targets import AHEAD, DEALT, DRAWN, IN_STAGE, NARROW, PLAIN, SLAB, WIDE

# The cases, by name: made when asked for. Cheap ones first: planted bugs are looked for in order.
CASES = {
    "swapped": lambda: targets.staged_case("w8a8", NARROW, (9, 3)),
    "swapped-fp4": lambda: targets.staged_case("w4a8_block", NARROW),
    "swapped-wide": lambda: targets.staged_case("w8a8", WIDE),
    "swapped-bf16": lambda: targets.staged_case("bf16", SLAB, has_bias=True),
    "swapped-deep": lambda: targets.staged_case("w8a8", WIDE, (9, 3, 5), num_sms=1, stages=6),
    "straight": lambda: targets.staged_case("w8a8", PLAIN, has_bias=True),
    "straight-dealt": lambda: targets.staged_case("w8a8", DEALT),
    "straight-drawn": lambda: targets.staged_case("w8a8", DRAWN, (5, 70, 3), stages=2),
    "straight-idle": lambda: targets.staged_case("w8a8", DRAWN, (5,), num_sms=3),
    "straight-fp4": lambda: targets.staged_case("w4a8_block", IN_STAGE),
    "fused": lambda: targets.fused_case(),
    "fused-idle": lambda: targets.fused_case(
        num_sms=4, tokens=1, experts=1, intermediate=128, top_k=1
    ),
    "fused-fp4": lambda: targets.fused_case("w4a8_block", window=2),
    "fused-bf16": lambda: targets.fused_case("bf16", has_bias=True, has_bad_slot=True),
    "fused-ranks": lambda: targets.local_case(),
    "fused-four": lambda: targets.local_case(
        ranks=4, ctas=1, counts=(1, 0, 2, 1), intermediate=128
    ),
    "fused-apart": lambda: targets.apart_case(),
    "straight-ahead": lambda: targets.staged_case(
        "w4a8_block", AHEAD, num_sms=3, hidden=512, counts=(5, 3, 2, 1)
    ),
    "straight-tail": lambda: targets.staged_case(
        "w4a8_block", AHEAD, num_sms=3, hidden=512, counts=(129,)
    ),
    "fused-ring": lambda: targets.fused_case(tokens=16, experts=3, pool_rows=32, intermediate=128),
}


@functools.cache
def case(name):
    made = CASES[name]()
    made.name = name
    made.learn()
    return made


@functools.cache
def reached(name):
    """(module, function) that a case runs."""
    one = case(name)
    with mutate.reached() as seen:
        one.run(targets.policies.Calm())
    return frozenset(seen)


@functools.cache
def planted_bugs():
    targets.kernels()
    return mutate.mutants(targets.MODULES)


def places(mutant):
    """Cases that run the mutant's code; of PTX, all that run its module's functions."""
    if mutant.code is None:
        return [name for name in CASES if any(m == mutant.module for m, _ in reached(name))]
    return [name for name in CASES if (mutant.module, mutant.function) in reached(name)]


# Where what only these launches have is looked for longer.
SPECIAL = ("fused-ring", "straight-tail", "straight-drawn", "fused-apart")


def hunt(mutant, base=0, seeds=3, special=60):
    """(case, seed, error) of who finds a planted bug first, or None."""
    names = places(mutant)
    rounds = [(seed, name) for seed in range(base, base + seeds) for name in names]
    more = range(base + seeds, base + special)
    rounds += [(seed, name) for seed in more for name in names if name in SPECIAL]
    with mutate.planted(mutant):
        for seed, name in rounds:
            found, error = is_found(case(name), (seed,))
            if found is not None:
                return name, found, error
    return None
