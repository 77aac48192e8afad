"""Launches around a call: inputs and outputs of graphs, tokens for peers, rows that come quantised.

Each follows from sizes alone, so whoever has other tokens than the plan's asks again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megamoe.layout.regions import ceil_div
from megamoe.planner.launches import Copy, Decode, Launch, Prepare, ReadArgs, next_power_of_2
from megamoe.planner.tables import copies as tables


class Around(NamedTuple):
    """The launches of a graph that lie around the call's own."""

    read_args: Launch
    copy_inputs: Launch
    copy_output: Launch


@lru_cache(maxsize=4096)
def put(num_tokens: int, hidden: int, top_k: int, num_passes: int) -> Launch:
    """A rank's tokens, ids and weights into the memory that a fused call's launches read."""
    passes = next_power_of_2(num_passes)
    return _copy("put", "_put_kernel", num_tokens, hidden, next_power_of_2(top_k), passes)


@lru_cache(maxsize=4096)
def around(num_tokens: int, hidden: int, top_k: int) -> Around:
    """The launches around a captured call of up to so many tokens."""
    read = ReadArgs(tables.READ_WARPS)
    return Around(
        Launch("read_args", "_read_args_kernel", (1,), read, tables.WHY_READ),
        _copy("copy_inputs", "_copy_inputs_kernel", num_tokens, hidden, next_power_of_2(top_k)),
        _copy("copy_output", "_copy_output_kernel", num_tokens, hidden),
    )


def _copy(
    name: str, kernel: str, num_tokens: int, hidden: int, max_slots: int = 0, max_passes: int = 0
) -> Launch:
    cols, warps, why = tables.COPIES[name]
    config = Copy(min(next_power_of_2(hidden), cols), warps, max_slots, max_passes)
    return Launch(name, kernel, (max(num_tokens, 1), ceil_div(hidden, config.cols)), config, why)


def decode(num_tokens: int, width: int) -> Launch:
    """Rows that come quantised, decoded for portable's GEMM."""
    config = Decode(tables.DECODE_VALUES, tables.DECODE_WARPS)
    grid = (ceil_div(num_tokens * width, config.values),)
    return Launch("decode", "_decode_kernel", grid, config, tables.WHY_DECODE)


def prepare(
    num_rows: int, width: int, num_groups: int, block_m: int, *, decodes: bool, is_sorted: bool
) -> Launch:
    """The maps of a grouped GEMM's tiles, and its rows decoded where the GEMM takes BF16."""
    config = Prepare(
        block_m, next_power_of_2(num_groups, 2), tables.PREPARE_CHUNK, tables.DECODE_VALUES,
        is_sorted, tables.PREPARE_WARPS,
    )  # fmt: skip
    programs = ceil_div(num_rows * width, config.values) if decodes else 0
    grid = (num_groups + programs,)
    return Launch("prepare", "_prepare_kernel", grid, config, tables.WHY_PREPARE)
