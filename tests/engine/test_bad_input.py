"""Bad input: each case is refused with what is required, what came and, where it helps, what to do."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import megamoe as mm
from megamoe.errors import (
    DeviceError,
    DTypeError,
    FileError,
    NotAvailable,
    RangeError,
    ShapeError,
)
from megamoe.problem import Options

E, I, H, K = 4, 64, 96, 2
BF16, F8, U8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8


def zeros(*shape, dtype=BF16, **kw):
    return torch.zeros(*shape, dtype=torch.float32, **kw).to(dtype)


def weights(recipe="w4a8"):
    return mm.ExpertWeights.quantize(zeros(E, 2 * I, H) + 1, zeros(E, H, I) + 1, recipe)


W, W8 = weights(), weights("w8a8")
X, IDX, WT = zeros(5, H), torch.zeros(5, K, dtype=torch.int64), torch.ones(5, K)


def call(x=X, idx=IDX, weight=WT, w=W, **options):
    return mm.moe(x, idx, weight, w, **options)


def at(t, token, slot, value):
    t = t.clone()
    t[token, slot] = value
    return t


def quantize(w13=None, w2=None, recipe="w4a8", **kw):
    w13 = zeros(E, 2 * I, H) if w13 is None else w13
    return mm.ExpertWeights.quantize(w13, zeros(E, H, I) if w2 is None else w2, recipe, **kw)


def take(recipe="w4a8", **change):
    """from_quantized with one thing changed."""
    made = weights(recipe)
    fields = {
        "w13_data": made.w13.data.flatten(1, 2),
        "w13_scale": None if made.w13.scale is None else made.w13.scale.flatten(1, 2),
        "w2_data": made.w2.data,
        "w2_scale": made.w2.scale,
        "w13_global": made.w13.global_scale,
        "w2_global": made.w2.global_scale,
    }
    fields |= {k: v(fields[k]) if callable(v) else v for k, v in change.items()}
    return mm.ExpertWeights.from_quantized(**fields, recipe=recipe)


def poison(t):
    t = t.clone()
    t.view(U8).flatten()[-1] = 255
    return t


# (what, the call, the error, words it must hold)
CASES = [
    # tokens
    ("x of rank 1", lambda: call(x=zeros(H)), ShapeError, "x must be [T, 96]"),
    ("x of rank 3", lambda: call(x=zeros(1, 5, H)), ShapeError, "x must be [T, 96]; got (1, 5, 96); call .flatten(0, -2)"),
    ("x too wide", lambda: call(x=zeros(5, H + 32)), ShapeError, "x must be [T, 96]"),
    ("x float32", lambda: call(x=zeros(5, H, dtype=torch.float32)), DTypeError, "bfloat16; got torch.float32"),
    ("x a list", lambda: call(x=[[0.0] * H]), DTypeError, "tensor or Quantized; got list"),
    ("x on meta", lambda: call(x=X.to("meta")), DeviceError, "on cpu; got meta"),
    ("x transposed", lambda: call(x=zeros(H, 5).T), ShapeError, "rows of x must be contiguous"),
    ("x needs grad", lambda: call(x=zeros(5, H).requires_grad_()), NotAvailable, "no backward"),
    ("x in another format", lambda: call(x=mm.quantize(X, "mxfp4")), RangeError, "in mxfp8; got mxfp4"),
    ("x quantised, narrow", lambda: call(x=mm.quantize(zeros(5, 64), "mxfp8")), ShapeError, "x must be [T, 96]"),
    # routing
    ("ids float", lambda: call(idx=IDX.float()), DTypeError, "int32 or int64; got torch.float32"),
    ("ids int16", lambda: call(idx=IDX.short()), DTypeError, "int32 or int64"),
    ("ids a list", lambda: call(idx=IDX.tolist()), DTypeError, "topk_idx must be a tensor"),
    ("ids of rank 1", lambda: call(idx=IDX[0]), ShapeError, "topk_idx must be [T, top_k]"),
    ("ids for other tokens", lambda: call(idx=IDX[:4]), ShapeError, "both be [5, top_k]"),
    ("ids strided", lambda: call(idx=torch.zeros(5, 2 * K, dtype=torch.int64)[:, ::2]), ShapeError, "contiguous"),
    ("ids on meta", lambda: call(idx=IDX.to("meta")), DeviceError, "got meta"),
    ("id past the last", lambda: call(idx=at(IDX, 3, 1, E)), RangeError, "got 4 at token 3, slot 1"),
    ("id below -1", lambda: call(idx=at(IDX, 2, 0, -2)), RangeError, "got -2 at token 2, slot 0"),
    ("more slots than experts", lambda: call(idx=IDX.repeat(1, 3), weight=WT.repeat(1, 3)), ShapeError, "top_k 6"),
    ("no slots", lambda: call(idx=IDX[:, :0], weight=WT[:, :0]), ShapeError, "top_k 0"),
    ("weights float64", lambda: call(weight=WT.double()), DTypeError, "float32; got torch.float64"),
    ("weights bf16", lambda: call(weight=WT.bfloat16()), DTypeError, "call .float()"),
    ("weights of another shape", lambda: call(weight=WT[:, :1].contiguous()), ShapeError, "(5, 2) and (5, 1)"),
    ("ids of one slot less", lambda: call(idx=IDX[:, :1]), ShapeError, "both be [5, top_k]; got (5, 1) and (5, 2)"),
    ("weights strided", lambda: call(weight=WT.T.contiguous().T), ShapeError, "topk_weights must be contiguous"),
    ("NaN weight", lambda: call(weight=at(WT, 1, 1, math.nan)), RangeError, "nan at token 1, slot 1"),
    ("infinite weight", lambda: call(weight=at(WT, 4, 0, math.inf)), RangeError, "inf at token 4, slot 0"),
    # options
    ("activation", lambda: call(activation="relu"), RangeError, "swiglu, gpt_oss, situ, geglu, geglu_tanh; got 'relu'"),
    ("clamp", lambda: call(clamp=-1.0), RangeError, "clamp must not be negative"),
    ("NaN clamp", lambda: call(clamp=math.nan), RangeError, "clamp must not be negative"),
    ("weight_at", lambda: call(weight_at="l2"), RangeError, "l1, combine"),
    ("combine", lambda: call(combine="int8"), RangeError, "bf16, fp8"),
    ("backend", lambda: call(backend="cuda"), RangeError, "backend must be one of"),
    ("mode", lambda: call(mode="fast"), RangeError, "mode must be one of"),
    ("mode split", lambda: call(mode="split", backend="portable"), NotAvailable, "portable"),
    # weights of another kind
    ("plain tensors as weights", lambda: call(w=zeros(E, 2 * I, H)), DTypeError, "must be an ExpertWeights"),
    ("shared of another width", lambda: call(shared=quantize(zeros(1, 64, 32), zeros(1, 32, 32))), ShapeError, "96 wide"),
    ("shared a tensor", lambda: call(shared=X), DTypeError, "shared must be an ExpertWeights"),
    ("recipe renamed", lambda: replace(W8, recipe="w4a8"), RangeError, "mxfp4 for recipe w4a8; got fp8_128x128"),
    ("parts of other recipes", lambda: mm.ExpertWeights.cat([W, W8]), ShapeError, "one recipe"),
    ("w2 of another shape", lambda: replace(W, w2=W.w2[:2]), ShapeError, "w2 must be [E, hidden, intermediate]"),
    ("bias of another shape", lambda: replace(W, b2=torch.zeros(E, I)), ShapeError, "b2 must have shape (4, 96)"),
    ("bias bf16 inside", lambda: replace(W, b2=zeros(E, H)), DTypeError, "b2 must be float32"),
    ("globals where none belong", lambda: replace(W, x_global=torch.tensor(1.0)), ShapeError, "no x_global"),
    ("globals missing", lambda: replace(weights("nvfp4"), x_global=None), ShapeError, "x_global is missing"),
    ("weights on two devices", lambda: replace(W, b2=torch.zeros(E, H, device="meta")), DeviceError, "one device"),
    # quantising
    ("unknown recipe", lambda: quantize(recipe="w2a2"), RangeError, "recipe must be one of"),
    ("w13 integers", lambda: quantize(zeros(E, 2 * I, H).int()), DTypeError, "got torch.int32"),
    ("w13 of rank 2", lambda: quantize(zeros(2 * I, H)), ShapeError, "3 dimensions"),
    ("w13 with odd rows", lambda: quantize(zeros(E, 2 * I + 1, H)), ShapeError, "[2 * intermediate, hidden]"),
    ("w2 transposed", lambda: quantize(w2=zeros(E, I, H)), ShapeError, "w2 [hidden, intermediate]"),
    ("fewer experts in w2", lambda: quantize(w2=zeros(E - 1, H, I)), ShapeError, "4 and 3"),
    ("hidden 100", lambda: quantize(zeros(E, 128, 100), zeros(E, 100, 64)), ShapeError, "multiple of 32; got 100"),
    ("NaN weights", lambda: quantize(at(zeros(E, 2 * I, H), 2, 5, math.nan)), RangeError, "NaN or Inf in expert 2"),
    ("Inf in BF16", lambda: quantize(at(zeros(E, 2 * I, H), 1, 0, math.inf), recipe="bf16"), RangeError, "expert 1"),
    ("NaN bias", lambda: quantize(b2=torch.full((E, H), math.nan)), RangeError, "b2 must be finite"),
    ("gate_up", lambda: quantize(gate_up="mixed"), RangeError, "split, interleaved"),
    ("x_global without NVFP4", lambda: quantize(x_global=2.0), RangeError, "no x_global"),
    ("x_global 0", lambda: quantize(recipe="nvfp4", x_global=0.0), RangeError, "positive and finite"),
    ("experts on meta", lambda: quantize(zeros(E, 2 * I, H).to("meta")), DeviceError, "must have values; got a meta tensor; use MoE.empty"),
    ("too few experts", lambda: mm.ExpertWeights.quantize_each([], 2, "bf16"), ShapeError, "got 0"),
    # checkpoints
    ("NaN scale in a checkpoint", lambda: take(w13_scale=poison), RangeError, "w13 must be finite; got NaN or Inf in expert 3"),
    ("NaN value in a checkpoint", lambda: take("w8a8", w2_data=poison), RangeError, "w2 must be finite"),
    ("negative FP32 scale", lambda: take("w8a8", w2_scale=lambda s: -s), RangeError, "not negative"),
    ("a direction of E8M0 scales", lambda: take(scales="divide"), RangeError, "the scales of mxfp4 multiply"),
    ("an unknown direction", lambda: take("nvfp4", scales="both"), RangeError, "scales must be one of"),
    ("scales missing", lambda: take(w13_scale=None), DTypeError, "needs scales"),
    ("scales as float bytes", lambda: take("w8a8", w2_scale=lambda s: s.to(U8)), DTypeError, "float32"),
    ("scales of half the rows", lambda: take(w2_scale=lambda s: s[:, ::2]), ShapeError, "scale must have shape"),
    ("FP8 data as MXFP4", lambda: take(w13_data=lambda d: d.view(F8)), DTypeError, "uint8 or int8"),
    ("bytes as FP8", lambda: take("w8a8", w13_data=lambda d: d.view(U8)), DTypeError, "float8_e4m3fn"),
    ("blocks of 8 bytes", lambda: take(w13_data=lambda d: d.unflatten(2, (-1, 8))), ShapeError, "16 bytes"),
    ("interleaved 128x128", lambda: take("w8a8", gate_up="interleaved"), RangeError, "de-interleave"),
    ("BF16 with scales", lambda: take("bf16", w13_scale=torch.ones(1, 1, 1)), ShapeError, "no scale"),
    ("NVFP4 without globals", lambda: take("nvfp4", w13_global=None), ShapeError, "global scale per expert"),
    ("NVFP4 global 0", lambda: take("nvfp4", w2_global=torch.zeros(E)), RangeError, "positive"),
    ("MXFP4 with globals", lambda: take(w2_global=torch.ones(E)), ShapeError, "no global scale"),
    # slicing and the module
    ("rank out of range", lambda: W.for_rank(2, 2), RangeError, "between 0 and 1"),
    ("ranks not dividing experts", lambda: W.for_rank(0, 3), ShapeError, "4 experts over 3 ranks"),
    ("empty slice", lambda: W[2:2], RangeError, "at least one expert"),
    ("one expert by number", lambda: W[1], RangeError, "by a slice"),
    ("layer with other experts", lambda: mm.MoE(W, 8, K), ShapeError, "num_experts 8 with weights of 4"),
    ("layer with a group", lambda: mm.MoE(W, E, K, group=object()), DTypeError, "torch.distributed process group"),
    ("placement of more ranks", lambda: mm.MoE(W, E, K, placement=mm.Placement.contiguous(E, 2)), ShapeError, "got 4 experts over 2"),
    ("placement of one rank in another order", lambda: mm.MoE(W, E, K, placement=mm.Placement(E, ((3, 2, 1, 0),))), ShapeError, "needs a group"),
    ("placement a list", lambda: mm.MoE(W, E, K, placement=[[0, 1, 2, 3]]), DTypeError, "must be a Placement; got list"),
    ("experts that are not there", lambda: W.take([1, 9]), RangeError, "numbers from 0 to 3"),
    ("placement uneven", lambda: mm.Placement(3, ((0, 1), (2,))), ShapeError, "got [2, 1]"),
    ("placement leaves one out", lambda: mm.Placement(4, ((0, 1), (2, 0))), RangeError, "got none of [3]"),
    ("placement twice on a rank", lambda: mm.Placement(2, ((0, 0), (1, 0))), RangeError, "got 0 on rank 0"),
    ("placement out of range", lambda: mm.Placement(2, ((0, 2), (1, 0))), RangeError, "got 2 on rank 0"),
    ("layer top_k 0", lambda: mm.MoE(W, E, 0), ShapeError, "top_k 0"),
    ("layer top_k differs", lambda: mm.MoE(W, E, 1)(X, IDX, WT), ShapeError, "topk_idx must be [T, 1]"),
    ("problem", lambda: mm.Problem(1, 64, 64, 6, 2, num_ranks=4), ShapeError, "6 experts over 4 ranks"),
    ("problem tokens", lambda: mm.Problem(-1, 64, 64, 6, 2), ShapeError, "negative"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "call_it", "kind", "words"), CASES, ids=[c[0] for c in CASES])
def test_bad_input_is_refused_with_what_got_fix(what, call_it, kind, words):
    with pytest.raises(kind) as caught:
        call_it()
    assert isinstance(caught.value, mm.MegaMoEError)
    assert words in str(caught.value)
    assert "; got " in str(caught.value)


def test_the_good_call_of_the_table_works():
    assert call().shape == (5, H)
    assert take().num_experts == take("w8a8").num_experts == take("nvfp4").num_experts == E
    assert Options(clamp=math.inf).limit == math.inf


def missing(path: Path) -> None:
    pass


def truncated(path: Path) -> None:
    W.save(path)
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_the_header(path: Path) -> None:
    W.save(path)
    path.write_bytes(path.read_bytes()[:20])


def foreign(path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, path)


def not_safetensors(path: Path) -> None:
    path.write_text("this is not a safetensors file at all")


def newer(path: Path) -> None:
    save_file(
        W.state_dict(), path, {"kind": "megamoe.ExpertWeights", "version": "99", "recipe": "w4a8"}
    )


@pytest.mark.parametrize(
    "write", [missing, truncated, cut_in_the_header, foreign, not_safetensors, newer]
)
def test_a_bad_file_is_refused(write, tmp_path):
    path = tmp_path / "experts.safetensors"
    write(path)
    with pytest.raises(FileError, match="got"):
        mm.ExpertWeights.load(path)


def test_a_file_that_names_another_recipe_or_lacks_tensors_is_refused(tmp_path):
    path = tmp_path / "experts.safetensors"
    head = {"kind": "megamoe.ExpertWeights", "version": "1"}
    save_file(W.state_dict(), path, {**head, "recipe": "w8a8"})
    with pytest.raises(mm.MegaMoEError, match="got"):
        mm.ExpertWeights.load(path)
    few = {n: t for n, t in W.state_dict().items() if n != "w2.data"}
    save_file(few, path, {**head, "recipe": "w4a8"})
    with pytest.raises(ShapeError, match="those of an ExpertWeights"):
        mm.ExpertWeights.load(path)


def test_a_failed_save_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "experts.safetensors"
    W.save(path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        Path(args[1]).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        W8.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["experts.safetensors"]
    with pytest.raises(FileError, match="folder must exist"):
        W.save(tmp_path / "nowhere" / "x.safetensors")
