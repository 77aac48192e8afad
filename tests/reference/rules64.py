"""The layer's rules evaluated in numpy float64, written apart from the package.

Formats by searching the element's grid, sums in float64, roundings one by one. `without` leaves
one step out, so that a test can show that the step matters.
"""

from __future__ import annotations

import math

import numpy as np

f32, f64 = np.float32, np.float64

WEIGHTS = {
    "bf16": "bf16", "w8a8": "fp8_128x128", "w4a16": "mxfp4", "w4a8": "mxfp4",
    "w4a8_block": "mxfp4", "w4a4": "mxfp4", "nvfp4": "nvfp4", "nvfp4a16": "nvfp4",
}  # fmt: skip
ACTS = {
    "bf16": "bf16", "w8a8": "fp8_1x128", "w4a16": "bf16", "w4a8": "mxfp8",
    "w4a8_block": "fp8_1x128", "w4a4": "mxfp4", "nvfp4": "nvfp4", "nvfp4a16": "bf16",
}  # fmt: skip
STEPS = (
    "bf16_gate_up", "clamp", "clamp_after_rounding", "quantise_acts", "weight_before_quantise",
    "weight_on_bias", "bf16_slot", "fp8_slot", "product_rounded", "ascending", "fp32_sum",
)  # fmt: skip

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], f64)
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)
assert E4M3[-1] == 448 and len(E4M3) == 127


def bf16(x):
    bits = np.asarray(x, f32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
    return np.where(np.isnan(x), f32(np.nan), rounded.view(f32))


def nearest(x, grid):
    """Nearest grid value, ties to the even index, saturating; keeps the sign."""
    size = np.abs(x).astype(f64)
    middle = (grid[1:] + grid[:-1]) / 2
    idx = np.searchsorted(middle, size, side="left")
    tie = (idx < len(middle)) & (middle[np.minimum(idx, len(middle) - 1)] == size)
    idx = idx + (tie & (idx % 2 == 1))
    return np.copysign(grid[idx], x)


def e8m0(amax, largest):
    _, exponent = np.frexp(amax.astype(f64))
    scale = exponent - 12
    for _ in range(14):
        scale = np.where(np.ldexp(largest, scale) < amax, scale + 1, scale)
    return np.where(amax == 0, 1.0, np.ldexp(1.0, np.clip(scale, -127, 127)))


def as_format(x, name, g=1.0):
    """Quantise and dequantise FP32 `x` along its last axis (128x128: last two); float64 values."""
    x, g = np.asarray(x, f32), f32(g)
    if name == "bf16":
        return bf16(x).astype(f64)
    if name == "fp8_128x128":
        out = np.empty(x.shape, f64)
        for r in range(0, x.shape[-2], 128):
            for c in range(0, x.shape[-1], 128):
                block = np.s_[..., r : r + 128, c : c + 128]
                scale = np.abs(x[block]).max(axis=(-2, -1), keepdims=True) / f32(448)
                scale = np.where(scale == 0, f32(1), scale)
                out[block] = nearest(x[block] / scale, E4M3) * scale.astype(f64)
        return out
    cols = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "fp8_1x128": 128, "fp8_combine": 128}[name]
    out = np.empty(x.shape, f64)
    for c in range(0, x.shape[-1], cols):
        part = x[..., c : c + cols]
        amax = np.abs(part).max(axis=-1, keepdims=True)
        out[..., c : c + cols] = _block(part, amax, name, g)
    return out


def _block(x, amax, name, g):
    if name == "fp8_1x128":
        scale = np.where(amax == 0, f32(1), amax / f32(448))
        return nearest(x / scale, E4M3) * scale.astype(f64)
    if name == "nvfp4":
        scale = nearest(np.where(amax == 0, f32(1), amax / (f32(6) * g)), E4M3)
        step = f32(g) * scale.astype(f32)
        safe = np.where(step == 0, f32(1), step)
        codes = np.where(step == 0, 0.0, nearest(x / safe, E2M1))
        return codes * scale * f64(g)
    grid, largest = (E2M1, 6.0) if name == "mxfp4" else (E4M3, 448.0)
    scale = e8m0(amax, largest)
    return nearest(x.astype(f64) / scale, grid) * scale


def weights_as(w, recipe):
    """[E, ..., rows, cols] BF16 values -> float64 values as stored."""
    name = WEIGHTS[recipe]
    if name != "nvfp4":
        return as_format(w, name)
    out = np.empty(w.shape, f64)
    for e, expert in enumerate(w):
        g = np.abs(expert).max().astype(f32) / f32(2688)
        out[e] = as_format(expert, name, g if g > 0 else f32(1))
    return out


def layer(x, idx, weight, w13, w2, recipe, *, activation="swiglu", clamp=np.inf, b13=None, b2=None,
          weight_at="l1", combine="bf16", without=""):  # fmt: skip
    """x [T, H], idx and weight [T, k], w13 [E, 2, I, H], w2 [E, H, I] as stored -> BF16 values."""
    assert without in ("", *STEPS)
    tokens = as_format(x, ACTS[recipe])
    y = np.zeros(x.shape, f32)
    slots = range(idx.shape[1])
    for t in range(len(x)):
        total = np.zeros(x.shape[1], f64 if without == "fp32_sum" else f32)
        for s in slots if without != "ascending" else reversed(slots):
            e = idx[t, s]
            if e < 0:
                continue
            row = _expert(
                tokens[t], f32(weight[t, s]), w13[e], w2[e], recipe, activation, clamp,
                None if b13 is None else b13[e], None if b2 is None else b2[e],
                weight_at, combine, without,
            )  # fmt: skip
            if weight_at == "combine":
                product = f64(row) * f64(weight[t, s])
                row = product if without == "product_rounded" else product.astype(f32)
            total = (total.astype(f64) + row).astype(total.dtype)
        y[t] = bf16(total.astype(f32))
    return y


def _expert(x, weight, w13, w2, recipe, activation, clamp, b13, b2, weight_at, combine, without):
    gate, up = (_linear(x, w13[i], None if b13 is None else b13[i]) for i in (0, 1))
    if without == "clamp_after_rounding":
        gate, up = np.minimum(gate, f32(clamp)), np.clip(up, f32(-clamp), f32(clamp))
    if without != "bf16_gate_up":
        gate, up = bf16(gate), bf16(up)
    if without not in ("clamp", "clamp_after_rounding"):
        gate, up = np.minimum(gate, f32(clamp)), np.clip(up, f32(-clamp), f32(clamp))
    wide = gate.astype(f64)
    if activation == "situ":
        soft = 4 * np.tanh(wide / 4) / (1 + np.exp(-wide))
        acts = soft.astype(f32) * (25 * np.tanh(up.astype(f64) / 25)).astype(f32)
    elif activation == "geglu":
        phi = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in wide.ravel()])
        acts = (wide * phi.reshape(wide.shape)).astype(f32) * up
    elif activation == "geglu_tanh":
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
        acts = (wide * 0.5 * (1 + np.tanh(inner))).astype(f32) * up
    elif activation == "swiglu":
        acts = (gate.astype(f64) / (1 + np.exp(-gate.astype(f64)))).astype(f32) * up
    else:
        swish = (gate.astype(f64) / (1 + np.exp(-1.702 * gate.astype(f64)))).astype(f32)
        acts = swish * (up + f32(1))
    late = weight_at == "l1" and without == "weight_before_quantise"
    if weight_at == "l1" and not late:
        acts = acts * weight
    stored = acts.astype(f64) if without == "quantise_acts" else as_format(acts, ACTS[recipe])
    if late:
        stored = stored * f64(weight)
    if b2 is not None and weight_at == "l1" and without != "weight_on_bias":
        b2 = b2 * weight
    row = _linear(stored, w2, b2)
    if without != "bf16_slot":
        row = bf16(row)
    if combine == "fp8" and without != "fp8_slot":
        row = as_format(row, "fp8_combine").astype(f32)
    return row


def _linear(x, w, bias):
    sums = (w @ x).astype(f32)
    return sums if bias is None else sums + bias.astype(f32)
