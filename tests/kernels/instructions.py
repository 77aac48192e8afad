"""The instructions that a Blackwell GEMM of a format must have: MMA, copies, counts of pairs.

Tests and `scripts/compile_blackwell.py` ask the same of every configuration.
"""

import re
from typing import Any, NamedTuple

from megamoe.kernels.blackwell.formats import FORMATS, SCALED_MMAS
from megamoe.kernels.gluon.compat import VERSION
from tests.kernels.descriptors import decoded, faults

PLAIN = {"bf16": "f16", "w4a16": "f16", "w8a8": "f8f6f4"}
# Later PTX names the values under a scale, earlier how many scales four lanes of K have.
BLOCK = {"scale_vec::1X": "block32", "scale_vec::2X": "block32", "scale_vec::4X": "block16"}
K_OF_ONE = {"e2m1": 64, "e4m3": 32, "bf16": 16}  # of one MMA, by the tokens' element


class Asked(NamedTuple):
    """What a launch was compiled for."""

    recipe: str
    block_m: int  # tokens
    block_k: int
    num_halves: int = 2
    num_ctas: int = 1
    num_stages: int = 0
    num_sums: int = 0
    gathers: bool = False

    @staticmethod
    def of_tile(recipe: str, tile: Any, *, gathers: bool = False) -> "Asked":
        """Of a planner's tile."""
        return Asked(
            recipe, tile.block_m, tile.block_k, tile.num_halves, tile.num_ctas, tile.num_stages,
            tile.num_sums, gathers,
        )  # fmt: skip

    @staticmethod
    def of_constants(given: dict[str, Any]) -> "Asked":
        """Of the compile-time arguments of either kernel; the fused one has two halves."""
        return Asked(
            given["FORMAT"].name, given["TOKENS"], given["BLOCK_K"], given.get("HALVES", 2),
            2 if given.get("PAIR") else 1, given["STAGES"], given["SUMS"],
            given.get("SOURCE") == "gather",
        )  # fmt: skip


def mma_of(recipe: str) -> str:
    """The MMA of a recipe as PTX names it."""
    kind = FORMATS[recipe]
    if not kind.SCALED.value:
        return PLAIN[recipe]
    name = SCALED_MMAS[kind.W.value, kind.X.value, kind.VEC.value]
    if VERSION >= (3, 8):
        name, vector = name.rsplit(".", 1)
        name += f".{BLOCK[vector]}"
    return name


def wrong_instructions(ptx: str, asked: Asked) -> list[str]:
    """What the PTX has and must not, or the other way round."""
    kind, ctas, bad = FORMATS[asked.recipe], asked.num_ctas, []

    def hold(is_right: bool, text: str) -> None:
        if not is_right:
            bad.append(text)

    mmas = set(re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::(\S+)", ptx))
    hold(mmas == {(str(ctas), mma_of(asked.recipe))}, f"MMAs {sorted(mmas)} of {asked.recipe}")
    has_cp = f"tcgen05.cp.cta_group::{ctas}.warpx4.32x128b" in ptx
    hold(has_cp == kind.SCALED.value, f"{'' if has_cp else 'no '}copies of scales (UTCCP)")
    hold("cp.async.bulk.tensor.2d" in ptx, "no cp.async.bulk.tensor.2d")
    hold(("tile::gather4" in ptx) == asked.gathers, f"gather4 {'missing' * asked.gathers}")
    hold("tcgen05.commit" in ptx, "no tcgen05.commit")
    rows = decoded(ptx)
    sizes = {(row["m"], row["n"]) for row in rows}
    hold(sizes == {(128 * ctas, asked.block_m)}, f"MMAs of {sorted(sizes)}")
    types = {(row["a_type"], row["b_type"]) for row in rows}
    hold(types == {(kind.W.value, kind.X.value)}, f"MMAs of {sorted(types)}")
    num, is_deep = num_of_mmas(ptx, asked, len(rows))
    hold(bool(rows) and len(rows) % num == 0, f"{len(rows)} MMAs, not a multiple of {num}")
    bad += [f"descriptor: {fault}" for row in rows for fault in faults(row, is_deep=is_deep)]
    return bad + (wrong_of_pairs(ptx, asked) if ctas == 2 else [])


def num_of_mmas(ptx: str, asked: Asked, num_rows: int) -> tuple[int, bool]:
    """(MMAs of a stage, of which the first may be peeled; whether they have 96 of K).

    Packed FP4 may take 96 of K at a time on sm_103a, from Triton 3.9 on.
    """
    x = FORMATS[asked.recipe].X.value
    num = asked.num_halves * (asked.block_k // K_OF_ONE[x])
    is_deep = bool(
        num_rows % num and ".target sm_103a" in ptx and x == "e2m1" and VERSION >= (3, 9)
    )
    return (asked.num_halves * -(-asked.block_k // 96) if is_deep else num), is_deep


def wrong_of_pairs(ptx: str, asked: Asked) -> list[str]:
    """The same of what pairs add, as Triton 3.8 and newer make it: counts, bytes, barriers."""
    bad, stages, sums = [], asked.num_stages, asked.num_sums

    def hold(is_right: bool, text: str) -> None:
        if not is_right:
            bad.append(f"pairs: {text}")

    commits = ptx.count("tcgen05.commit.cta_group::2"), ptx.count("multicast::cluster.b64")
    hold(commits == (2, 2), f"{commits} commits, and to both")
    tokens = re.findall(r"cp\.async\.bulk\.tensor\.5d\.cta_group::2\S*\.multicast::cluster", ptx)
    hold(len(tokens) == 1, f"{len(tokens)} copies of tokens' scales to both")
    counts = re.findall(r"mbarrier\.init\S* \[[^\]]*\], (\d+);", ptx)
    # full: two loaders of both CTAs; empty, summed: a commit; taken: both epilogues
    wanted = ["4"] * stages + ["1"] * (stages + sums) + ["2"] * sums
    hold(counts == wanted, f"mbarriers count {counts}, not {wanted}")
    kind = FORMATS[asked.recipe]
    words = asked.block_k // kind.VEC.value // 4
    weights = 2 * (128 * asked.block_k * kind.W_BITS.value // 8 + 512 * words)
    halves = asked.block_m * asked.block_k * kind.X_BITS.value // 16 + 512 * words
    expected = re.findall(
        r"mbarrier\.arrive\.expect_tx\.shared::cluster\.b64 _, \[[^\]]*\], (\d+)", ptx
    )
    hold(sorted(map(int, expected)) == sorted((weights, halves)), f"{expected} bytes expected")
    # CTAs meet once mbarriers are initialised, and before one of them gives its memory back.
    begin = ptx.rfind("mbarrier.init")
    first = ptx[begin : ptx.find("mbarrier.try_wait", begin)]
    hold("barrier.cluster.wait" in first, "no cluster barrier after mbarrier.init")
    ends = [end.start() for end in re.finditer(r"tcgen05\.dealloc\.cta_group::2", ptx)]
    hold(bool(ends), "no dealloc")
    meets = all("barrier.cluster.wait" in ptx[end - 600 : end] for end in ends)
    hold(meets, "no cluster barrier before dealloc")
    return bad
