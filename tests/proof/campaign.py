"""Which launches are explored, and who finds a planted bug."""

import functools

from megamoe.problem import Options
from tests.emulator import mutate
from tests.emulator.exploring import is_found
from tests.proof import chains, failing, targets
from tests.proof.targets import DYNAMIC, NARROW, PER_TILE, PER_WAVE, PLAIN, SLAB, STATIC, WIDE

# The cases, by name: made when asked for. Cheap ones first: planted bugs are looked for in order.
CASES = {
    "swap-ab": lambda: targets.staged_case("w8a8", NARROW, (9, 3)),
    "swap-ab-fp4": lambda: targets.staged_case("w4a8_block", NARROW),
    "swap-ab-wide": lambda: targets.staged_case("w8a8", WIDE),
    "swap-ab-bf16": lambda: targets.staged_case("bf16", SLAB, has_bias=True),
    "swap-ab-deep": lambda: targets.staged_case("w8a8", WIDE, (9, 3, 5), num_sms=1, stages=6),
    "plain": lambda: targets.staged_case("w8a8", PLAIN, has_bias=True),
    "plain-static": lambda: targets.staged_case("w8a8", STATIC),
    "plain-dynamic": lambda: targets.staged_case("w8a8", DYNAMIC, (5, 70, 3), stages=2),
    "plain-idle": lambda: targets.staged_case("w8a8", DYNAMIC, (5,), num_sms=3),
    "plain-fp4": lambda: targets.staged_case("w4a8_block", PER_TILE),
    "staged-small": lambda: targets.whole_case(NARROW, 3),
    "staged-large": lambda: targets.whole_case(DYNAMIC, 40),
    "chain": lambda: chains.part_case("w8a8", WIDE),
    "chain-nvfp4": lambda: chains.part_case("nvfp4", WIDE),
    "chain-static": lambda: chains.part_case("w8a8", STATIC),
    "chain-dynamic": lambda: chains.part_case("w8a8", DYNAMIC, (5, 70, 3)),
    "chain-whole": lambda: chains.whole_case(),
    "chain-absent": failing.absent_case,
    "chain-given-up": failing.given_up_case,
    "chain-replayed": lambda: chains.whole_case(tile=DYNAMIC, is_early=False),
    "chain-passes": lambda: chains.whole_case(counts=((9, 9),), pool_rows=16, tile=STATIC),
    "chain-ready": lambda: chains.whole_case(
        counts=((1, 1),), is_ready=True, options=Options(weight_at="combine")
    ),
    "chain-apart": lambda: chains.apart_case(),
    "chain-shared": lambda: chains.whole_case(
        "bf16", counts=((2, 1),), num_shared=1, options=Options(combine="fp8"), has_bad_slot=True
    ),
    "chain-fp8-rows": lambda: chains.whole_case(counts=((2, 1),), options=Options(combine="fp8")),
    "chain-four": lambda: chains.whole_case(
        "w4a8_block", 4, counts=((1, 0, 2, 1), (1, 0, 2, 1)), experts=4
    ),
    "chain-late": failing.late_case,
    "chain-hurried": failing.hurried_case,
    "chain-split": lambda: targets.split_case("w8a8", WIDE),
    "chain-split-per-wave": lambda: targets.split_case(
        "w4a8_block", PER_WAVE, num_sms=5, hidden=512, counts=(5, 3, 2)
    ),
    "fused": lambda: targets.fused_case(),
    "fused-idle": lambda: targets.fused_case(
        num_sms=4, tokens=1, experts=1, intermediate=128, top_k=1
    ),
    "fused-fp4": lambda: targets.fused_case("w4a8_block", window=2),
    "fused-shared": lambda: targets.fused_case("w4a8_block", num_shared=1, tokens=2),
    "fused-bf16": lambda: targets.fused_case("bf16", has_bias=True, has_bad_slot=True),
    "fused-ranks": lambda: targets.local_case(),
    "fused-four": lambda: targets.local_case(
        ranks=4, ctas=1, counts=(1, 0, 2, 1), intermediate=128, has_bad_slot=True
    ),
    "fused-apart": lambda: targets.apart_case(),
    "fused-late": targets.late_case,
    "plain-late": targets.late_decoders_case,
    "plain-per-wave": lambda: targets.staged_case(
        "w4a8_block", PER_WAVE, num_sms=3, hidden=512, counts=(5, 3, 2, 1)
    ),
    "staged-per-wave": lambda: targets.whole_case(
        PER_WAVE, 40, "w4a8_block", experts=4, hidden=512, intermediate=256, num_sms=3
    ),
    "plain-tail": lambda: targets.staged_case(
        "w4a8_block", PER_WAVE, num_sms=3, hidden=512, counts=(129,)
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
    with mutate.reached(targets.TEXTS) as seen:
        one.run(targets.policies.Calm())
    return frozenset(seen)


@functools.cache
def planted_bugs():
    targets.kernels()
    return mutate.mutants(targets.MODULES, targets.TEXTS)


def places(mutant):
    """Cases that run the mutant's code."""
    return [name for name in CASES if (mutant.module, mutant.function) in reached(name)]


# Where what only these launches have is looked for longer.
SPECIAL = ("fused-ring", "plain-tail", "plain-dynamic", "fused-apart", "chain-apart")


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
