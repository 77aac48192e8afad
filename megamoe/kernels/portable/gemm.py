"""Grouped GEMMs over tokens sorted by expert: plain, gated (with or without gather), finalising.

Two kernels serve the four variants (E003): `_gated_kernel` computes gate and up of a block of
columns side by side and applies the activation; `_linear_kernel` one product, and puts each row
where it belongs. Formats come in as `Kind`s (operands.py, acts.py).
"""

import triton
import triton.language as tl

from megamoe.kernels.common.compat import after_previous, to_bf16
from megamoe.kernels.portable.acts import store_acts
from megamoe.kernels.portable.operands import add_product, second_scale


@triton.jit
def _place(program, live, num_n, GROUP_M: tl.constexpr):
    """(token tile, column block) of a program: GROUP_M token tiles share their weights' columns.

    GROUP_M = 1 walks the columns of one token tile first; a large one walks along M.
    """
    per_group = GROUP_M * num_n
    first = program // per_group * GROUP_M
    size = tl.minimum(live - first, GROUP_M)
    inside = program % per_group
    return first + inside % size, inside // size


@triton.jit
def _tanh(x):
    """FP32 tanh, a few units in the last place."""
    size = tl.abs(x)
    power = tl.exp(-2.0 * size)
    far = tl.div_rn(1.0 - power, 1.0 + power)
    square = size * size
    near = size - size * square * (0.33333334 - square * 0.13333334)  # 1 - power would cancel
    result = tl.where(size < 0.1, near, far)
    return tl.where(x < 0, -result, result)


@triton.jit
def _activate(gate, up, clamp, ACTIVATION: tl.constexpr, FAST_MATH: tl.constexpr):
    """BF16 gate and up to the gated activation in FP32."""
    gate = tl.minimum(to_bf16(gate).to(tl.float32), clamp, tl.PropagateNan.ALL)
    up = to_bf16(up).to(tl.float32)
    up = tl.maximum(tl.minimum(up, clamp, tl.PropagateNan.ALL), -clamp, tl.PropagateNan.ALL)
    if ACTIVATION == "geglu":
        return gate * (0.5 * (1.0 + tl.erf(gate * 0.70710678))) * up
    if ACTIVATION == "geglu_tanh":
        inner = 0.7978846 * (gate + 0.044715 * gate * gate * gate)
        return gate * (0.5 * (1.0 + _tanh(inner))) * up
    is_oss: tl.constexpr = ACTIVATION == "gpt_oss"
    power = 1.0 + tl.exp(-1.702 * gate if is_oss else -gate)
    if ACTIVATION == "situ":
        gate = 4.0 * _tanh(gate * 0.25)
        up = 25.0 * _tanh(up * 0.04)
    swish = gate / power if FAST_MATH else tl.div_rn(gate, power)
    return swish * (up + 1.0) if is_oss else swish * up


@triton.jit
def _gated_kernel(
    x, x_scale, w, w_scale, w_global, x_global, bias, topk_weights, out, out_scale, acts_global,
    to_expanded, tile_group, tile_limit, num_tiles, hidden, intermediate, clamp,
    TOKENS: tl.constexpr, WEIGHTS: tl.constexpr, ACTS: tl.constexpr,
    ACTIVATION: tl.constexpr, FAST_MATH: tl.constexpr, WEIGHTED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GLOBAL: tl.constexpr, TOKEN_GLOBAL: tl.constexpr,
    GATHER: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """L1 and the activation: acts[row, n] of one token tile and BLOCK_N columns."""
    after_previous()
    live = tl.load(num_tiles)
    num_n = tl.cdiv(intermediate, BLOCK_N)
    if ACTS.ORDERED:  # whole blocks of 128, the last one filled with zeros
        num_n = tl.cdiv(intermediate, 128) * (128 // BLOCK_N)
    if tl.program_id(0) >= live * num_n:
        return
    tile, n = _place(tl.program_id(0), live, num_n, GROUP_M)
    expert = tl.load(tile_group + tile).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < tl.load(tile_limit + tile)
    expanded = tl.load(to_expanded + row, mask=valid, other=0)
    x_row = (expanded // TOP_K if GATHER else row).to(tl.int64)
    col = n * BLOCK_N + tl.arange(0, BLOCK_N)
    used = col < intermediate
    gate_row = expert * 2 * intermediate + col
    first = (expert * 2 * intermediate + n * BLOCK_N).to(tl.int32)
    gate_scale = expert * 2 * tl.cdiv(intermediate, 128) + n * BLOCK_N // 128
    up_scale = gate_scale + tl.cdiv(intermediate, 128)
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(0, tl.maximum(hidden, 1), BLOCK_K):  # see add_product
        tokens, token_scale = TOKENS.load(x, x_scale, x_row, valid, k, hidden, BLOCK_K)
        tile_g, scale_g, factor_g = WEIGHTS.load(
            w, w_scale, first, gate_row, used, gate_scale, k, hidden, BLOCK_K
        )
        tile_u, scale_u, factor_u = WEIGHTS.load(
            w, w_scale, first + intermediate, gate_row + intermediate, used, up_scale, k, hidden,
            BLOCK_K,
        )  # fmt: skip
        gate = add_product(gate, tile_g, scale_g, factor_g, tokens, token_scale, TOKENS, WEIGHTS)
        again = second_scale(token_scale, TOKENS)
        up = add_product(up, tile_u, scale_u, factor_u, tokens, again, TOKENS, WEIGHTS)
    # Loaded again: it need not live through the loop.
    slot = tl.load(to_expanded + row, mask=valid, other=0, eviction_policy="evict_first")
    if HAS_GLOBAL:
        token_global = 1.0
        if TOKEN_GLOBAL:
            token = slot // TOP_K if GATHER else row
            token_global = tl.load(x_global + token, mask=valid, other=0.0)[None, :]
        gate *= tl.load(w_global + expert * 2) * token_global
        up *= tl.load(w_global + expert * 2 + 1) * token_global
    if HAS_BIAS:
        gate += tl.load(bias + gate_row, mask=used, other=0.0)[:, None]
        up += tl.load(bias + gate_row + intermediate, mask=used, other=0.0)[:, None]
    acts = _activate(gate, up, clamp, ACTIVATION, FAST_MATH)
    if WEIGHTED:
        acts *= tl.load(topk_weights + slot, mask=valid, other=0.0)[None, :]
    acts = tl.trans(tl.where(used[:, None], acts, 0.0))
    g = tl.load(acts_global + expert) if TOKEN_GLOBAL else 1.0
    store_acts(
        acts, g, out, out_scale, row, valid, n * BLOCK_N, intermediate, ACTS, BLOCK_M, BLOCK_N
    )


@triton.jit
def _linear_tile(
    program, live, num_n, x, x_scale, w, w_scale, w_global, x_global, bias, topk_weights,
    out, out_scale, to_expanded, tile_group, tile_limit, width, num_cols, first_slot, num_slots,
    TOKENS: tl.constexpr, WEIGHTS: tl.constexpr, ACTS: tl.constexpr,
    STORE: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GLOBAL: tl.constexpr, TOKEN_GLOBAL: tl.constexpr,
    GATHER: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One token tile and BLOCK_N columns of `_linear_kernel`."""
    tile, n = _place(program, live, num_n, GROUP_M)
    expert = tl.load(tile_group + tile).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < tl.load(tile_limit + tile)
    x_row = row.to(tl.int64)
    if GATHER:
        x_row = tl.load(to_expanded + row, mask=valid, other=0).to(tl.int64) // TOP_K
    col = n * BLOCK_N + tl.arange(0, BLOCK_N)
    used = col < num_cols
    w_row = expert * num_cols + col
    first = (expert * num_cols + n * BLOCK_N).to(tl.int32)
    scale_row = expert * tl.cdiv(num_cols, 128) + n * BLOCK_N // 128
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(0, tl.maximum(width, 1), BLOCK_K):  # see add_product
        tokens, token_scale = TOKENS.load(x, x_scale, x_row, valid, k, width, BLOCK_K)
        tile_w, scale_w, factor = WEIGHTS.load(
            w, w_scale, first, w_row, used, scale_row, k, width, BLOCK_K
        )
        acc = add_product(acc, tile_w, scale_w, factor, tokens, token_scale, TOKENS, WEIGHTS)
    if HAS_GLOBAL:
        row_global = tl.load(x_global + expert) if TOKEN_GLOBAL else 1.0
        acc *= tl.load(w_global + expert) * row_global
    expanded = tl.load(to_expanded + row, mask=valid, other=0)
    if HAS_BIAS:
        extra = tl.load(bias + w_row, mask=used, other=0.0)[:, None]
        if WEIGHT_BIAS:
            extra = extra * tl.load(topk_weights + expanded, mask=valid, other=0.0)[None, :]
        acc += extra
    rows = tl.trans(tl.where(used[:, None], acc, 0.0))
    if STORE == "atomic":
        rows = to_bf16(rows).to(tl.float32)
        if WEIGHTED:
            rows *= tl.load(topk_weights + expanded, mask=valid, other=0.0)[:, None]
        at = (expanded // TOP_K).to(tl.int64)[:, None] * num_cols + col[None, :]
        tl.atomic_add(out + at, rows, mask=valid[:, None] & used[None, :], sem="relaxed")
    else:
        out_row = row
        if STORE == "slots":
            out_row = expanded // TOP_K * num_slots + first_slot + expanded % TOP_K
        store_acts(
            to_bf16(rows).to(tl.float32), 1.0, out, out_scale, out_row, valid,
            n * BLOCK_N, num_cols, ACTS, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _linear_kernel(
    x, x_scale, w, w_scale, w_global, x_global, bias, topk_weights, out, out_scale,
    to_expanded, tile_group, tile_limit, num_tiles, ticket, width, num_cols, first_slot, num_slots,
    TOKENS: tl.constexpr, WEIGHTS: tl.constexpr, ACTS: tl.constexpr,
    STORE: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GLOBAL: tl.constexpr, TOKEN_GLOBAL: tl.constexpr,
    GATHER: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DYNAMIC: tl.constexpr,
):  # fmt: skip
    """One linear over permuted rows. STORE: "rows" as they stand, "slots" at (token, slot),
    "atomic" added to the token in FP32 in any order.

    A program takes the tile of its own number, or with DYNAMIC takes tiles from `ticket` until none
    is left (C005); which program computes a tile changes no bit of it.
    """
    after_previous()
    live = tl.load(num_tiles)
    num_n = tl.cdiv(num_cols, BLOCK_N)
    if DYNAMIC:
        program = tl.atomic_add(ticket, 1, sem="relaxed")
        while program < live * num_n:
            _linear_tile(
                program, live, num_n, x, x_scale, w, w_scale, w_global, x_global, bias,
                topk_weights, out, out_scale, to_expanded, tile_group, tile_limit,
                width, num_cols, first_slot, num_slots, TOKENS, WEIGHTS, ACTS, STORE, WEIGHTED,
                WEIGHT_BIAS, HAS_BIAS, HAS_GLOBAL, TOKEN_GLOBAL, GATHER, TOP_K, BLOCK_M, BLOCK_N,
                BLOCK_K, GROUP_M,
            )  # fmt: skip
            program = tl.atomic_add(ticket, 1, sem="relaxed")
    else:
        if tl.program_id(0) >= live * num_n:
            return
        _linear_tile(
            tl.program_id(0), live, num_n, x, x_scale, w, w_scale, w_global, x_global, bias,
            topk_weights, out, out_scale, to_expanded, tile_group, tile_limit,
            width, num_cols, first_slot, num_slots, TOKENS, WEIGHTS, ACTS, STORE, WEIGHTED,
            WEIGHT_BIAS, HAS_BIAS, HAS_GLOBAL, TOKEN_GLOBAL, GATHER, TOP_K, BLOCK_M, BLOCK_N,
            BLOCK_K, GROUP_M,
        )  # fmt: skip
