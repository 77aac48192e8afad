"""The first hour on a Blackwell GPU: one copy, one product a format, and how long sums round.

A kernel of its own, of one CTA whose warps do one thing after the other, so that what fails here is
the hardware's behaviour or our reading of it, and not a pipeline: copies of FP4 that widen to bytes
(`expect` counts the packed ones), scales by tcgen05.cp in blocks of 128 rows whatever N is, and
tcgen05.mma with block scales. Emulated and compiled, not yet run on the hardware.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.certify.rules import GRIDS
from megamoe.kernels.blackwell.fences import fence_after_wait
from megamoe.kernels.gluon.compat import blackwell_tma as tma
from megamoe.kernels.gluon.compat import get_tmem_reg_layout
from megamoe.kernels.gluon.pipeline import barriers

ROWS = 128  # weight rows: the M of a block-scaled MMA
BLOCK_K = 256  # 128 beside FP8 tokens, where a padded row of 256 would need two copies
NS = (8, 16, 64, 128)  # tokens
# Off by, in shares of the sum of all terms' sizes: products are exact, sums may be rounded as often
# as there are steps.
BOUND = 2.0**-12
SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=5)


class Kind(NamedTuple):
    """A product: elements, bits of a token, values that share a scale, and what the scales are."""

    x: str
    x_bits: int
    vec: int
    is_e8m0: bool
    block_k: int = BLOCK_K


# fmt: off
KINDS = {
    "w4a8":  Kind("e4m3", 8, 32, True, 128),
    "w4a4":  Kind("e2m1", 4, 32, True),
    "nvfp4": Kind("e2m1", 4, 16, False),
}
# fmt: on


@gluon.jit
def _placed(buf, NUM: gl.constexpr):
    """Placed scales as [128, NUM]: what tcgen05_copy turns into 32x128b.warpx4."""
    return buf.reshape([1, NUM // 4, 32, 4, 4]).permute((0, 3, 2, 1, 4)).reshape([128, NUM])


@gluon.jit(do_not_specialize=["steps"])
def product_kernel(
    w, ws, x, xs, out, steps,
    X: gl.constexpr, VEC: gl.constexpr, N: gl.constexpr, BLOCK_K: gl.constexpr,
    X_PACK: gl.constexpr, MULTIPLY: gl.constexpr,
):  # fmt: skip
    """out[128, N] in FP32: 128 weight rows times N tokens; without MULTIPLY the copies alone."""
    NUM: gl.constexpr = BLOCK_K // VEC
    BYTES: gl.constexpr = (
        w.block_type.nbytes + ws.block_type.nbytes + x.block_type.nbytes + xs.block_type.nbytes
    )
    w_buf = gl.allocate_shared_memory(w.dtype, w.block_type.shape, w.layout)
    ws_buf = gl.allocate_shared_memory(ws.dtype, ws.block_type.shape, ws.layout)
    x_buf = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    xs_buf = gl.allocate_shared_memory(xs.dtype, xs.block_type.shape, xs.layout)
    layout: gl.constexpr = TensorMemoryLayout((128, N), col_stride=1)
    sums = allocate_tensor_memory(gl.float32, [128, N], layout)
    w_scales = allocate_tensor_memory(ws.dtype, [128, NUM], TensorMemoryScalesLayout())
    x_scales = allocate_tensor_memory(xs.dtype, [128, NUM], TensorMemoryScalesLayout())
    loaded = barriers(1, 1).index(0)
    if MULTIPLY:  # a barrier that is never waited for must not be there
        done = barriers(1, 1).index(0)
    phase = 0
    use_acc = False
    for k in range(steps):
        mbarrier.expect(loaded, BYTES)
        tma.async_copy_global_to_shared(w, [0, k * (BLOCK_K // 2)], loaded, w_buf)
        tma.async_copy_global_to_shared(x, [0, k * (BLOCK_K // X_PACK)], loaded, x_buf)
        at = k * (NUM // 4)
        tma.async_copy_global_to_shared(ws, [0, 0, at, 0, 0], loaded, ws_buf)
        tma.async_copy_global_to_shared(xs, [0, 0, at, 0, 0], loaded, xs_buf)
        mbarrier.wait(loaded, phase)
        if MULTIPLY:
            fence_after_wait()
            tcgen05_copy(_placed(ws_buf, NUM), w_scales)
            tcgen05_copy(_placed(xs_buf, NUM), x_scales)
            tcgen05_mma_scaled(
                w_buf, x_buf.permute((1, 0)), sums, w_scales, x_scales, "e2m1", X, use_acc=use_acc
            )
            tcgen05_commit(done)
            mbarrier.wait(done, phase)
        phase ^= 1
        use_acc = True
    REGISTERS: gl.constexpr = get_tmem_reg_layout(gl.float32, (128, N), layout, gl.num_warps())
    if MULTIPLY:
        fence_after_wait()
        values = sums.load(REGISTERS)
    else:
        values = gl.full([128, N], 1.0, gl.float32, REGISTERS)
    rows = gl.arange(0, 128, layout=gl.SliceLayout(1, REGISTERS))
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, REGISTERS))
    gl.store(out + rows[:, None] * N + columns[None, :], values)


def operand_layout(rows: int, block_k: int, bits: int, is_mixed: bool) -> gl.NVMMASharedLayout:
    """Shared memory of an operand; FP4 beside FP8 takes a byte a value."""
    element, pack = (gl.uint8, 2) if bits == 4 else (gl.float8e4nv, 1)
    return gl.NVMMASharedLayout.get_default_for(
        [rows, block_k // pack], element, fp4_padded=bits == 4 and is_mixed
    )


def place(scales: Tensor) -> Tensor:
    """Scales [128, n] -> [1, 1, n / 4, 2, 256]: byte 16 l + 4 g + j is scale j of row 32 g + l."""
    parts = scales.view(torch.uint8).view(1, 4, 32, -1, 4).permute(0, 3, 2, 1, 4)
    return parts.reshape(1, 1, -1, 2, 256).contiguous().view(scales.dtype)


class Case(NamedTuple):
    """Operands of one product as bytes, and what it must give."""

    w: Tensor  # uint8 [128, k / 2]
    ws: Tensor  # placed
    x: Tensor  # uint8 [N, k / 2] or E4M3 [N, k]
    xs: Tensor
    y: Tensor  # float64 [128, N]
    size: Tensor  # float64 [128, N]: the sum of all terms' sizes


def case(kind: Kind, n: int, k: int, *, is_adversarial: bool = False) -> Case:
    """Random codes and scales; adversarial: terms of one size that climb, then cancel."""
    rng = torch.Generator().manual_seed(n + k)

    def codes(rows: int, bits: int) -> tuple[Tensor, Tensor]:
        """(bytes, values)."""
        grid = torch.from_numpy(GRIDS["e2m1" if bits == 4 else "e4m3"])
        top = len(grid) if bits == 4 else 120  # up to 240: no sums beyond FP32's
        at = torch.randint(top, (rows, k), generator=rng)
        sign = torch.randint(2, (rows, k), generator=rng)
        if is_adversarial:
            at = torch.full_like(at, 7 if bits == 4 else 64)
            sign = torch.zeros_like(sign)
            if rows == ROWS:
                sign[:, k // 2 :] = 1
        values = grid[at] * (1 - 2.0 * sign)
        raw = (at | sign << (bits - 1)).to(torch.uint8)
        if bits == 4:
            raw = raw[:, ::2] | raw[:, 1::2] << 4
        return raw, values

    def scales(rows: int) -> tuple[Tensor, Tensor]:
        """(as stored, values), of 128 rows whatever the operand has."""
        shape = (ROWS, k // kind.vec)
        if kind.is_e8m0:
            code = torch.randint(120, 132, shape, generator=rng).to(torch.uint8)
            code = torch.full_like(code, 127) if is_adversarial else code
            return code, 2.0 ** (code[:rows].double() - 127)
        code = torch.randint(40, 72, shape, generator=rng).to(torch.uint8)
        code = torch.full_like(code, 56) if is_adversarial else code
        return code.view(torch.float8_e4m3fn), torch.from_numpy(GRIDS["e4m3"])[code[:rows].long()]

    (w, w_values), (x, x_values) = codes(ROWS, 4), codes(n, kind.x_bits)
    (ws, w_scale), (xs, x_scale) = scales(ROWS), scales(n)
    left = w_values * w_scale.repeat_interleave(kind.vec, 1)
    right = x_values * x_scale.repeat_interleave(kind.vec, 1)
    if kind.x_bits == 8:
        x = x.view(torch.float8_e4m3fn)
    return Case(w, place(ws), x, place(xs), left @ right.T, left.abs() @ right.abs().T)


def descriptors(kind: Kind, n: int, case: Case) -> tuple[TensorDescriptor, ...]:
    """Weights, their scales, tokens, their scales, as the kernel takes them."""
    is_mixed, depth = kind.x_bits == 8, kind.block_k
    box = [1, 1, depth // (4 * kind.vec), 2, 256]
    x_pack = 8 // kind.x_bits

    def over(t: Tensor, block: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
        return TensorDescriptor(t, list(t.shape), list(t.stride()), block, layout)

    return (
        over(case.w, [ROWS, depth // 2], operand_layout(ROWS, depth, 4, is_mixed)),
        over(case.ws, box, SCALES),
        over(case.x, [n, depth // x_pack], operand_layout(n, depth, kind.x_bits, is_mixed)),
        over(case.xs, box, SCALES),
    )


def product(name: str, n: int, case: Case, device: torch.device, *, multiply: bool) -> Tensor:
    """One launch: float32 [128, N], on the CPU."""
    kind = KINDS[name]
    there = Case(*(t.to(device) for t in case))
    out = torch.zeros(ROWS, n, dtype=torch.float32, device=device)
    steps = case.w.shape[1] * 2 // kind.block_k
    w, ws, x, xs = descriptors(kind, n, there)
    product_kernel[(1,)](
        w=w, ws=ws, x=x, xs=xs, out=out, steps=steps, X=kind.x, VEC=kind.vec, N=n,
        BLOCK_K=kind.block_k, X_PACK=8 // kind.x_bits, MULTIPLY=multiply, num_warps=4,
    )  # fmt: skip
    return out.cpu()
