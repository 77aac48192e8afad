"""FP4 weights from a register image to wgmma's A operand, in registers.

A slab is 64 rows x 128 columns: 4096 bytes of values, in which thread i's 16 bytes lie at 16 i
(`layout.tiles.RegisterImage`), and one scale per row and group. A 32-bit word holds eight values
of one row and one group, so decoding never leaves the thread. Exponents of images that decode to
E4M3 take four bits: those of both rows of a thread are one byte.

The upper half of a word's codes comes down by dp2a, which multiplies halves and adds: a shift would
wait for the pipe that table look-ups and masks fill already.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon.compat import reinterpret


def _to_e4m3(words: int) -> str:
    """PTX for eight E2M1 a word to eight E4M3, low and high, with the group's exponent added.

    prmt looks magnitudes up in a table of two registers, which the exponent shifts (bytes by 8 d,
    d = r + 5, r = -5..6: exact); signs are merged in. Operands: low, high of each word, words, d.
    """
    scale = f"${3 * words}"
    table = f"""mad.lo.u32 l1, {scale}, 0x08080808, 0x24201C18;
mad.lo.u32 l0, {scale}, 0x08080800, 0x14100800;
"""

    def decoded(low: str, high: str, word: str) -> str:
        return f"""and.b32 m, {word}, 0x77777777;
prmt.b32 {low}, l0, l1, m;
lop3.b32 {low}, {low}, {word}, 0x80808080, 0xF8;
dp2a.lo.u32.u32 m, m, 0x0100, 0;
prmt.b32 {high}, l0, l1, m;
shl.b32 m, {word}, 4;
lop3.b32 {high}, {high}, m, 0x80808080, 0xF8;
"""

    body = "".join(decoded(f"${2 * i}", f"${2 * i + 1}", f"${2 * words + i}") for i in range(words))
    return "{\n.reg .b32 m, l0, l1;\n" + table + body + "}"


PAIR_WORDS = gl.constexpr(32)  # of a slab: its exponents of four bits
# wgmma's A of E4M3 [64, 128], for which images are made; the MMA is the plain GEMM's.
PLAIN_MMA = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)
E4M3_OPERAND = gl.constexpr(gl.DotOperandLayout(0, PLAIN_MMA.value, 4))
FOUR_TO_E4M3 = gl.constexpr(_to_e4m3(4))  # of a row, which share a scale


def _to_bf16(scales: str, table: int) -> str:
    """PTX for eight E2M1 to eight BF16: high and low bytes by table, times each half's scale.

    `scales` sets s0 and s1 from $5; `table` has the high bytes. Products are exact. A look-up takes
    one constant as it is; the other is $9 or $13, or it would be brought anew for each.
    """
    high, low = f"$9, {table:#x}", "$13, 0xC0804000"
    return f"""{{
.reg .b32 m, h, hb, lb, s0, s1;
{scales}and.b32 m, $4, 0x77777777;
prmt.b32 hb, {high}, m;
prmt.b32 lb, {low}, m;
lop3.b32 hb, hb, $4, 0x80808080, 0xF8;
prmt.b32 $0, lb, hb, 0x5140;
prmt.b32 $1, lb, hb, 0x7362;
dp2a.lo.u32.u32 m, m, 0x0100, 0;
shl.b32 h, $4, 4;
prmt.b32 hb, {high}, m;
prmt.b32 lb, {low}, m;
lop3.b32 hb, hb, h, 0x80808080, 0xF8;
prmt.b32 $2, lb, hb, 0x5140;
prmt.b32 $3, lb, hb, 0x7362;
mul.rn.bf16x2 $0, $0, s0;
mul.rn.bf16x2 $1, $1, s0;
mul.rn.bf16x2 $2, $2, s1;
mul.rn.bf16x2 $3, $3, s1;
}}"""


# MXFP4 with scales up to 2: bits of a value stand where BF16 has its sign, the end of its exponent
# and the first of its mantissa, so it is 2**126 too small, 0.5 a subnormal; the scale's exponent,
# code + 126, makes up for it. In two of a word's four pairs the scales take the signs.
PLACED_TO_BF16 = gl.constexpr("""{
.reg .b32 t, s, s2, s3;
mul.lo.u32 s, $5, 0x00800080;
and.b32 $0, $4, 0x81C081C0;
shl.b32 t, $4, 3;
and.b32 $1, t, 0x81C081C0;
shl.b32 t, $4, 6;
and.b32 $2, t, 0x01C001C0;
shr.b32 t, $4, 3;
and.b32 $3, t, 0x01C001C0;
shl.b32 t, $4, 2;
lop3.b32 s2, t, 0x80008000, s, 0x6A;
shl.b32 t, $4, 1;
lop3.b32 s3, t, 0x80008000, s, 0x6A;
mul.rn.bf16x2 $0, $0, s;
mul.rn.bf16x2 $1, $1, s;
mul.rn.bf16x2 $2, $2, s2;
mul.rn.bf16x2 $3, $3, s3;
}""")
LOW_BYTES = gl.constexpr(0xC0800000 - (1 << 32))  # of the first four values, as MX_ and NV_BYTES
# Times 2**(code - 127), codes 1..254.
MX_BYTES = gl.constexpr(0x3F3F3F00)
MX_TO_BF16 = gl.constexpr(_to_bf16("mul.lo.u32 s0, $5, 0x00800080;\nmov.b32 s1, s0;\n", 0x40404040))
# NVFP4: two E4M3 scales in the low bytes, one per half of the word. Shifted into BF16's fields they
# are 2**120 too small, subnormals included, and the table's values are 2**120 too large.
NV_BYTES = gl.constexpr(0x7B7B7B00)
NV_TO_BF16 = gl.constexpr(
    _to_bf16(
        """prmt.b32 s0, $5, 0, 0x4040;
prmt.b32 s1, $5, 0, 0x4141;
shl.b32 s0, s0, 4;
shl.b32 s1, s1, 4;
""",
        0x7C7C7C7C,
    )
)

# [upper rows, warp, g, t, step, value]: how a slab's bytes lie over the threads of a warpgroup.
SLAB = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[
            [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0],
            [1, 0, 0, 0, 0, 0],
        ],
        lane_bases=[
            [0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0],
            [0, 0, 4, 0, 0, 0],
        ],
        warp_bases=[[0, 1, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0]],
        block_bases=[],
        shape=[2, 4, 8, 4, 4, 4],
    )
)  # fmt: skip
# [upper rows, warp, g, t, step]: the same in words.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [1, 0, 0, 0, 0]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]],
        [[0, 1, 0, 0, 0], [0, 2, 0, 0, 0]], [], [2, 4, 8, 4, 4],
    )
)  # fmt: skip
_WORD_BYTES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]))
_SCALES = gl.constexpr(gl.SliceLayout(3, gl.SliceLayout(5, SLAB.value)))
_LANES = gl.constexpr(  # of t alone
    gl.SliceLayout(
        0,
        gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, gl.SliceLayout(5, SLAB.value)))),
    )
)
_BYTES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0]))
_PAIRS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(4, WORDS.value)))
_UPPER = gl.constexpr(
    gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, WORDS.value))))
)
_PAIR_BYTES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
_SCALE_BYTES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))


@gluon.jit
def _read_slab(w_bufs, s_bufs, at, NUM: gl.constexpr, SCALE: gl.constexpr):
    """Slab `at` of NUM: its bytes and its scales, one int32 per row and group of 32."""
    w = reinterpret(w_bufs, gl.uint8, [NUM, 2, 4, 8, 4, 4, 4], _BYTES).index(at).load(SLAB)
    s = reinterpret(s_bufs, SCALE, [NUM, 2, 4, 8, 4], _SCALE_BYTES).index(at).load(_SCALES)
    return w, gl.expand_dims(gl.expand_dims(s.to(gl.int32), 3), 5)


@gluon.jit
def read_words(w_bufs, s_bufs, at, NUM: gl.constexpr):
    """A slab whose columns stand by group (`common.columns`): its words, and a byte for both rows.

    Words, since bytes that are kept over a loop take a register each.
    """
    w = reinterpret(w_bufs, gl.int32, [NUM, 2, 4, 8, 4, 4], _WORD_BYTES).index(at).load(WORDS)
    s = reinterpret(s_bufs, gl.uint8, [NUM, 4, 8, 4], _PAIR_BYTES).index(at).load(_PAIRS)
    return w, s.to(gl.int32)


@gluon.jit
def e4m3_of_words(w, s, DOT: gl.constexpr):
    """E4M3 [64, 128] in the operand layout DOT, of what `read_words` gave."""
    s = gl.expand_dims(gl.expand_dims(s, 0), 4)
    upper = gl.arange(0, 2, _UPPER)
    for dim in gl.static_range(1, 5):
        upper = gl.expand_dims(upper, dim)
    s = gl.where(upper == 0, s & 15, s >> 4)
    low0, high0, low1, high1, low2, high2, low3, high3 = gl.inline_asm_elementwise(
        FOUR_TO_E4M3, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [w, s],
        dtype=(
            gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv,
            gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv,
        ),
        is_pure=True, pack=4,
    )  # fmt: skip
    first_half = gl.join(gl.join(low0, high0), gl.join(low1, high1))
    second_half = gl.join(gl.join(low2, high2), gl.join(low3, high3))
    a = gl.join(first_half, second_half).permute((1, 0, 2, 7, 6, 5, 3, 4)).reshape([64, 128])
    return gl.convert_layout(a, DOT, assert_trivial=True)


@gluon.jit
def e4m3_slab(w_bufs, s_bufs, at, NUM: gl.constexpr, DOT: gl.constexpr):
    """E4M3 [64, 128] in the operand layout DOT."""
    w, s = read_words(w_bufs, s_bufs, at, NUM)
    return e4m3_of_words(w, s, DOT)


@gluon.jit
def _bf16_slab(w, s, at, HIGH: gl.constexpr, ASM: gl.constexpr, DOT: gl.constexpr):
    """BF16 [64, 128] of the bytes and scales of slab `at`; HIGH is the program's table."""
    # Zero, which no compiler knows: what is added to it stays in a register.
    lane = gl.arange(0, 4, _LANES)
    lane = gl.expand_dims(gl.expand_dims(gl.expand_dims(lane, 0), 1), 2)
    zero = gl.expand_dims(gl.expand_dims((at + lane) >> 31, 4), 5)
    low, high = gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r", [w, s, zero + HIGH, zero + LOW_BYTES],
        dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip
    return _bf16_operand(low, high, DOT)


@gluon.jit
def _bf16_operand(low, high, DOT: gl.constexpr):
    """The two halves of each word's values in the operand layout DOT."""
    a = gl.join(low, high).reshape([2, 4, 8, 4, 4, 2, 2, 2])
    a = a.permute((1, 0, 2, 4, 7, 5, 3, 6)).reshape([64, 128])
    return gl.convert_layout(a, DOT, assert_trivial=True)


@gluon.jit
def placed_bf16_slab(w_bufs, s_bufs, at, NUM: gl.constexpr, DOT: gl.constexpr):
    """BF16 [64, 128] of MXFP4 whose bits are placed, with its scales."""
    w, s = _read_slab(w_bufs, s_bufs, at, NUM, gl.uint8)
    low, high = gl.inline_asm_elementwise(
        PLACED_TO_BF16, "=r,=r,=r,=r,r,r,r,r,r", [w, s], dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=4,
    )  # fmt: skip
    return _bf16_operand(low, high, DOT)


@gluon.jit
def mx_bf16_slab(w_bufs, s_bufs, at, NUM: gl.constexpr, DOT: gl.constexpr):
    """BF16 [64, 128] of MXFP4 with its scales."""
    w, s = _read_slab(w_bufs, s_bufs, at, NUM, gl.uint8)
    return _bf16_slab(w, s, at, MX_BYTES, MX_TO_BF16, DOT)


@gluon.jit
def nv_bf16_slab(w_bufs, s_bufs, at, NUM: gl.constexpr, DOT: gl.constexpr):
    """BF16 [64, 128] of NVFP4 with its block scales, without its global scale."""
    w, s = _read_slab(w_bufs, s_bufs, at, NUM, gl.uint16)
    return _bf16_slab(w, s, at, NV_BYTES, NV_TO_BF16, DOT)
