"""Published times of the reference system on B200, beside which the study is simulated.

Every figure is of others: the fused kernel on eight ranks (two models), fused and split kernels of
one sweep (two widths, four and eight ranks), and packed FP4 activations against FP8 ones.
Times in us. Cells with FIT set the constants of `simulator.constants.BLACKWELL`; the others were
only looked at. `python -m tests.simulator.published_cells` prints all of them (a minute or two).
"""

from typing import NamedTuple

from megamoe.problem import Problem
from megamoe.simulator.simulate import simulate
from megamoe.studies.deep_gemm.plan import plan
from megamoe.studies.deep_gemm.schedule import schedule_of

FIT, SEEN = "fitted", "looked at"


class Published(NamedTuple):
    """One cell: a call of the reference system, and what its authors measured."""

    name: str
    problem: Problem
    mode: str
    us: float
    use: str
    block_k: int = 128  # as published; later code has deeper stages for the narrowest tile

    def predicted(self) -> float:
        made = plan(self.problem, "b200", mode=self.mode, block_k=self.block_k)
        return simulate(schedule_of(made)).time_us


FLASH, PRO = (4096, 2048, 256, 6), (7168, 3072, 384, 6)  # hidden, intermediate, experts, top_k

# fmt: off
# The fused kernel, eight ranks, FP8 x FP4. (model, tokens a rank, us, use)
FUSED = (
    ("flash", 1, 56.5, FIT), ("flash", 512, 146.5, FIT),
    ("flash", 8192, 1283.1, FIT), ("flash", 32768, 4855.5, SEEN),
    ("pro", 1, 108.1, SEEN), ("pro", 512, 369.6, SEEN),
    ("pro", 8192, 2818.5, SEEN), ("pro", 32768, 10655.2, SEEN),
)
# Of the sweep these were fitted: (mode, ranks, intermediate, tokens).
FITTED = {
    ("fused", 8, 3072, 16), ("fused", 8, 3072, 128), ("fused", 8, 3072, 512),
    ("fused", 8, 3072, 1024), ("fused", 8, 3072, 8192), ("split", 8, 3072, 16),
    ("split", 8, 3072, 128), ("split", 8, 3072, 512), ("split", 8, 3072, 1024),
    ("split", 8, 3072, 8192), ("split", 8, 2048, 1024), ("split", 4, 2048, 64),
    ("split", 4, 2048, 1024),
}
# One sweep, hidden 7168, top-6 of 384: (ranks, intermediate, {tokens: (fused, split)})
SWEEP = (
    (8, 3072, {16: (304.3, 305.2), 32: (320.9, 325.8), 64: (326.4, 334.1), 128: (341.0, 357.7),
               512: (392.7, 408.6), 1024: (492.8, 508.7), 4096: (1476.9, 1454.5),
               8192: (2820.4, 2722.0)}),
    (8, 2048, {16: (229.4, 226.8), 32: (245.7, 241.7), 64: (246.8, 245.4), 128: (269.5, 278.5),
               512: (298.4, 304.4), 1024: (403.0, 416.4), 4096: (1199.4, 1101.6),
               8192: (2307.8, 2046.7)}),
    (4, 3072, {16: (405.8, 403.0), 32: (519.8, 522.2), 64: (565.1, 576.1), 128: (573.4, 587.4),
               512: (633.4, 673.3), 1024: (726.0, 744.8), 4096: (1726.4, 1724.4),
               8192: (2827.8, 2813.9)}),
    (4, 2048, {16: (301.7, 304.6), 32: (369.7, 372.8), 64: (409.5, 408.9), 128: (414.2, 421.2),
               512: (463.6, 484.8), 1024: (526.1, 534.2), 4096: (1281.6, 1261.9),
               8192: (2194.1, 2133.1)}),
)
# One rank, flash with all its experts, 512 tokens: (recipe, K of a stage, us). Nothing was fitted.
ONE_RANK = (("w4a4", 256, 537.6), ("w4a4", 128, 712.5), ("w4a8", 128, 753.2))
# Packed FP4 activations, four ranks, flash: (tokens a rank, tile, published gain of stages of 256
# over 128, how far beside that the model is), and the gain over FP8 activations at 256 to 8192
# tokens.
DEEPER = (
    (128, 32, (0.10, 0.10), 0.0), (256, 64, (0.02, 0.06), 0.039), (2048, 192, (0.04, 0.04), -0.039),
)
OVER_FP8 = (0.08, 0.12)
# fmt: on


def packed(tokens: int, recipe: str, block_k: int | None = None) -> float:
    """Simulated time of flash on four ranks."""
    made = plan(Problem(tokens, *FLASH, 4, recipe), "b200", block_k=block_k)
    return simulate(schedule_of(made)).time_us


def fused_cells() -> tuple[Published, ...]:
    shapes = {"flash": FLASH, "pro": PRO}
    return tuple(
        Published(f"{model} {tokens}", Problem(tokens, *shapes[model], 8, "w4a8"), "fused", us, use)
        for model, tokens, us, use in FUSED
    )


def sweep_cells() -> tuple[Published, ...]:
    return tuple(
        Published(
            f"{mode} {ranks} x {width} {tokens}",
            Problem(tokens, 7168, width, 384, 6, ranks, "w4a8"),
            mode,
            us,
            FIT if (mode, ranks, width, tokens) in FITTED else SEEN,
        )
        for ranks, width, rows in SWEEP
        for tokens, both in rows.items()
        for mode, us in zip(("fused", "split"), both, strict=True)
    )


def one_rank_cells() -> tuple[Published, ...]:
    return tuple(
        Published(
            f"one rank, {recipe}, stages of {block_k}", Problem(512, *FLASH, 1, recipe), "fused",
            us, SEEN, block_k,
        )
        for recipe, block_k, us in ONE_RANK
    )  # fmt: skip


CELLS = {cell.name: cell for cell in (*fused_cells(), *sweep_cells(), *one_rank_cells())}


if __name__ == "__main__":
    for cell in CELLS.values():
        us = cell.predicted()
        name = cell.name.replace(" x ", " ranks, ")
        print(f"| {name} | {cell.us:,.1f} | {us:,.1f} | {us / cell.us - 1:+.1%} | {cell.use} |")
    for tokens, tile, gain, _ in DEEPER:
        found = packed(tokens, "w4a4", 128) / packed(tokens, "w4a4", 256) - 1
        print(f"| stages of 256, tile {tile} | {gain} | {found:+.1%} |")
    for tokens in (256, 1024, 2048, 8192):
        found = packed(tokens, "w4a8", 128) / packed(tokens, "w4a4") - 1
        print(f"| over FP8, {tokens} tokens | {OVER_FP8} | {found:+.1%} |")
