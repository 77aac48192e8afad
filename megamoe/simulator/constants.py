"""The constants of the simulator: one table with value, unit and where each comes from.

Five of them are fitted (`fit.py`), on the five flash-ep8 cells of one peer alone: one H200,
2026-11-15, staged FP8 grouped GEMM peer. One is set on this library's own launches on one rank, four
on ranks that share a GPU. The others are figures of the hardware or of single experiments, and are
never tuned to a total. BLACKWELL has rows
of its own, for all that is played on such a machine: nothing was measured there by us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from megamoe.errors import RangeError, require
from megamoe.hardware import Hardware


class Constant(NamedTuple):
    """One number of the model."""

    value: float
    unit: str
    source: str


_FITTED = "fitted on the flash-ep8 cells of the staged FP8 peer, one H200, 2026-11-15"
_OWN = "set on the ten fused decode cells of benchmarks/h200, one H200, 2026-11-18"
_ONE_LAUNCH = "one H200, a fused one-launch experiment, 2026-11"
_GUESS = "not measured here"
_RANKS = "of benchmarks/h200/overlap.json, 8 ranks of one H200, 2026-11-19"
_CROWD = f"set by hand with an eye on all 18 cells {_RANKS}"
_LINKS = f"set on the links alone of flash and v3, w8a8, 8192 tokens {_RANKS}"

# fmt: off
TABLE: dict[str, Constant] = {
    "stream_share":   Constant(0.818, "of reached HBM",    f"{_FITTED}: weights and rows of the matrix launches"),
    "own_share":      Constant(0.98,  "of reached HBM",    f"{_OWN}: the same of this library's launches on Hopper"),
    "row_share":      Constant(0.631, "of reached HBM",    f"{_FITTED}: launches that only move rows (permute, activation, combine)"),
    "start_us":       Constant(6.12,  "us a call",         f"{_FITTED}: cold caches, and write-back of what the last user of L2 left dirty"),
    "gap_us":         Constant(2.29,  "us a launch",       f"{_FITTED}: from the last block of a launch to the first of the next, ramp included"),
    "epilogue_us":    Constant(1.15,  "us a 128x128 tile", f"{_FITTED}: what a block takes beside its steps; smaller tiles take as long"),
    "sm_gbs":         Constant(112.0, "GB/s an SM",        "64 bytes a clock from L2 to an SM at 1.755 GHz, on paper"),
    "l2_share":       Constant(0.8,   "of L2",             f"{_GUESS}: what an expert's weights may fill before later row blocks read them again"),
    "route_us":       Constant(4.2,   "us a call",         f"{_ONE_LAUNCH}: counting and preparing, 9.5 us less 5.3 for an empty launch"),
    "sync_us":        Constant(1.2,   "us a barrier",      f"{_ONE_LAUNCH}: last block to first row of combine, between the SMs of one rank"),
    "barrier_us":     Constant(4.0,   "us a barrier",      f"{_GUESS}: between ranks over NVLink, a few round trips"),
    "link_us":        Constant(1.5,   "us a pull",         f"{_GUESS}: latency of a row over NVLink"),
    "pull_gbs":       Constant(19.0,  "GB/s an SM",        "copies by loads and stores from local memory, 18 to 20 on one H200, 2026-11"),
    "pull_group_us":  Constant(0.80,  "us a group",        f"8 rows of a pull beside their bytes; {_LINKS}"),
    "clock_drop":     Constant(0.33,  "of the clock",      f"how far it falls under matrix launches of this library; {_CROWD}"),
    "clock_us":       Constant(7000., "us",                f"in which it has fallen 63% of the way; {_CROWD}"),
    "crowd_share":    Constant(0.75,  "of own_share",      f"of ranks that share a GPU: eight working sets in one L2; {_CROWD}"),
    "window_us":      Constant(3.0,   "us",                "rows asked for ahead of those that have come: twice the latency"),
    "math_share":     Constant(1.0,   "of reached tensor", "math runs at what a large GEMM reached"),
    "fp4_share":      Constant(1.0,   "of reached tensor", "the same of FP4 with FP4; fitted for Blackwell alone"),
    "mma_rows":       Constant(0.0,   "rows a step",       "what a step of the tensor cores takes beside its rows; fitted for Blackwell alone"),
    "link_share":     Constant(1.0,   "of reached NVLink", "rows cross at what large copies reached"),
    "block_us":       Constant(0.0,   "us a block",        "what a block's math takes beside its steps; fitted for Blackwell alone"),
    "split_us":       Constant(0.0,   "us a block",        "the same where L1 and L2 are kernels of their own"),
    "wide_share":     Constant(1.0,   "of reached HBM",    "where a copy's rows have 128 B or more; set for Blackwell alone"),
}
# fmt: on
# Blackwell, of which nothing was measured here: fitted to times that others published of the
# reference system on B200 (tests/simulator/published_cells.py marks the cells). What no row names
# is as above.
_CELLS = (
    "simulated against published B200 times: fitted on the marked cells of the reference system"
)
# fmt: off
BLACKWELL: dict[str, Constant] = {
    "stream_share":   Constant(0.755, "of reached HBM",    f"{_CELLS}: copies whose rows have 64 B, 128 of FP4"),
    "wide_share":     Constant(0.854, "of reached HBM",    "published: 6.54 TB/s of packed FP4 with rows of 128 B, one B200"),
    "row_share":      Constant(0.45,  "of reached HBM",    f"{_CELLS}: combine"),
    "start_us":       Constant(20.4,  "us a call",         f"{_CELLS}: all that does not grow with tokens, beside launch, route and barriers"),
    "math_share":     Constant(0.88,  "of reached tensor", f"{_CELLS}: FP8 with FP4"),
    "fp4_share":      Constant(0.5,   "of reached tensor", f"{_CELLS}: FP4 with FP4, the published gain over FP8 at 8192 tokens"),
    "mma_rows":       Constant(25.9,  "rows a step",       f"{_CELLS}: a narrow tile is not faster in proportion"),
    "block_us":       Constant(1.25,  "us a block",        f"{_CELLS}: a pipeline that fills, sums that are handed over"),
    "split_us":       Constant(0.55,  "us a block",        f"{_CELLS}: the same of split kernels"),
    "epilogue_us":    Constant(4.0,   "us a 128x128 tile", f"{_CELLS}: by valid rows, beside the next block's math"),
    "link_share":     Constant(0.95,  "of reached NVLink", f"{_CELLS}"),
    "clock_drop":     Constant(0.0,   "of the clock",      "nothing was measured; published times include it"),
    "sm_gbs":         Constant(125.8, "GB/s an SM",        "64 bytes a clock from L2 to an SM at 1.965 GHz, on paper"),
}
# fmt: on

# tokens of a tile -> us that math takes for 128 columns of 256 weight rows, FP4, on H200: up to 32
# tokens by a launch that only computes, above such that whole layers come out: pro and v3 at 512
# tokens (benchmarks/h200/hopper-layer.txt). 256 tokens as two tiles of 128.
MATH_US = {8: 0.33, 16: 0.38, 32: 0.43, 64: 0.62, 128: 1.08, 256: 2.16}
# The same where FP4 is decoded once per wave: of a tile of 128 tokens, and once for the weights,
# which the tiles of an expert share. Set on the six staged cells of 2048 and 8192 tokens there.
DECODED_US, DECODE_US = 0.79, 0.55

# recipe -> bits of a weight, scale included, as launches read it where that is not the checkpoint's.
HELD_BITS = {"w4a8_block": 4.125}  # two exponents share a byte

_SHARES = (
    "stream_share", "own_share", "row_share", "wide_share", "math_share", "fp4_share", "link_share",
    "crowd_share",
)  # fmt: skip
FITTED = ("stream_share", "row_share", "start_us", "gap_us", "epilogue_us")


@dataclass(frozen=True, slots=True)
class Constants:
    """The table as a value, so that a fit or a test may pass others."""

    stream_share: float
    own_share: float
    row_share: float
    start_us: float
    gap_us: float
    epilogue_us: float
    sm_gbs: float
    l2_share: float
    route_us: float
    sync_us: float
    barrier_us: float
    link_us: float
    pull_gbs: float
    pull_group_us: float
    clock_drop: float
    clock_us: float
    crowd_share: float
    window_us: float
    math_share: float
    fp4_share: float
    mma_rows: float
    link_share: float
    block_us: float
    split_us: float
    wide_share: float

    def __post_init__(self) -> None:
        for name in (*_SHARES, "sm_gbs", "l2_share", "pull_gbs", "clock_us"):
            value = getattr(self, name)
            require(value > 0, f"{name} must be positive", got=value, kind=RangeError)
        for field in fields(self):
            value = getattr(self, field.name)
            require(value >= 0, f"{field.name} must not be negative", got=value, kind=RangeError)
        require(
            self.clock_drop < 1, "clock_drop must be below 1", got=self.clock_drop, kind=RangeError
        )
        for name in _SHARES:
            value = getattr(self, name)
            require(value <= 1, f"{name} must not exceed 1", got=value, kind=RangeError)

    @staticmethod
    def of(table: Mapping[str, Constant]) -> Constants:
        """The values of a table."""
        return Constants(**{name: constant.value for name, constant in table.items()})


DEFAULT = Constants.of(TABLE)
B200 = Constants.of({**TABLE, **BLACKWELL})


def constants_for(hardware: Hardware) -> Constants:
    """The constants of a machine, whose launches and whichever backend: Blackwell has its own."""
    return B200 if hardware.is_blackwell else DEFAULT
