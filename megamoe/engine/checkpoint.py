"""Foreign tensors into ExpertWeights: layouts, dtypes, gate and up order, NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe.errors import DeviceError, DTypeError, RangeError, ShapeError, one_of, require
from megamoe.formats.elements import e8m0_to_float
from megamoe.formats.quantize import FLOATS
from megamoe.formats.quantized import DATA_DTYPE, Quantized
from megamoe.formats.spec import Format, Scale, recipe_named

GATE_UP = ("split", "interleaved")
SCALES = ("multiply", "divide")
# A scale and its reciprocal look alike. NVFP4's global scale is amax / 2688 (6 * 448) or, stored as
# a divisor, 2688 / amax; read the wrong way round, amax becomes 2688**2 / amax. At 2688 both
# readings agree; above it the other one is the likelier. FP8's scales are held to it too.
LARGEST_WEIGHT = 2688.0
# The same for tokens and activations, which may be larger: up to 8 * 2688 = 21504 is believed.
LARGEST_ACTS_GLOBAL = 8.0
_BYTES = (torch.uint8, torch.int8)
_E8M0 = torch.float8_e8m0fnu
_FP4_PAIRS = getattr(torch, "float4_e2m1fn_x2", None)


def read_matrix(
    data: Tensor,
    scale: Tensor | None,
    global_scale: Tensor | None,
    fmt: Format,
    name: str,
    *,
    gate_up: str | None = None,
    scales: str | None = None,
) -> Quantized:
    """Bring one stacked checkpoint matrix into our layout; with `gate_up` to [E, 2, I, H]."""
    check_direction(scales, fmt)
    data = _data(data, fmt, name)
    width = data.shape[2] * (2 if fmt.element.bits == 4 else 1)
    shape: tuple[int, ...] = (data.shape[0], data.shape[1], width)
    if fmt.scale is Scale.NONE:
        require(scale is None, f"{name}: {fmt.name} has no scale", got="a scale", kind=ShapeError)
    else:
        scale = _scale(scale, fmt, name)
        if scales == "divide" and not fmt.has_global:
            scale = scale.reciprocal()
    if gate_up is not None:
        one_of(gate_up, GATE_UP, "gate_up")
        require(
            shape[1] % 2 == 0, f"{name} must have 2 * intermediate rows", got=shape, kind=ShapeError
        )
        require(
            fmt.block[0] == 1 or gate_up == "split",
            f"{name}: interleaved gate and up rows would share the scales of {fmt.name}",
            got='gate_up="interleaved"',
            fix="de-interleave before quantising, or use a recipe with one scale per row",
            kind=RangeError,
        )
        shape = (shape[0], 2, shape[1] // 2, width)
        data = gate_then_up(data, gate_up)
        if scale is not None:
            require(
                scale.ndim == 3 and scale.shape[1] % 2 == 0,
                f"{name}: scales must be [E, rows of gate and up, ...]",
                got=tuple(scale.shape),
                kind=ShapeError,
            )
            scale = gate_then_up(scale, gate_up)
    g = _global(global_scale, fmt, name, shape)
    if g is not None and scales == "divide":
        g = g.reciprocal()
    if scale is not None:
        scale = scale.contiguous()  # kernels read it densely; other libraries keep it transposed
    matrix = Quantized(data, scale, fmt.name, shape, g)
    refuse_nan(matrix, name)
    if scales is None:
        refuse_reciprocal(matrix, name)
    return matrix


def check_direction(scales: str | None, fmt: Format) -> None:
    """Require a direction that this format's scales can have."""
    if scales is None:
        return
    one_of(scales, SCALES, "scales")
    require(
        scales == "multiply" or fmt.scale in (Scale.E4M3, Scale.FP32),
        f"the scales of {fmt.name} multiply",
        got='scales="divide"',
        kind=RangeError,
    )


def refuse_reciprocal(matrix: Quantized, name: str) -> None:
    """Refuse scales that make some expert's weights larger than any model's."""
    fmt = matrix.spec
    if fmt.scale not in (Scale.E4M3, Scale.FP32):
        return
    assert matrix.scale is not None
    largest = fmt.element.max * matrix.scale.flatten(1).float().amax(1)
    if matrix.global_scale is not None:
        largest = largest * matrix.global_scale.reshape(len(matrix), -1).amax(1)
    worst = float(largest.amax())
    refuse_too_large(worst, name, f" in expert {int(largest.argmax())}")


def refuse_too_large(worst: float, name: str, where: str = "") -> None:
    """Refuse weights that only scales stored as reciprocals would make."""
    require(
        worst <= LARGEST_WEIGHT,
        f"{name}: scales must multiply, to weights of at most {LARGEST_WEIGHT:g}",
        got=f"weights of up to {worst:.3g}{where}",
        fix='scales="divide" where the checkpoint stores reciprocals (weight_global_scale of '
        'compressed-tensors), scales="multiply" if they are so large',
        kind=RangeError,
    )


def gate_then_up(rows: Tensor, gate_up: str) -> Tensor:
    """[..., 2I, k] in checkpoint order -> [..., 2, I, k]: gate, then up."""
    if gate_up == "split":
        split: Tensor = rows.unflatten(-2, (2, -1))
        return split
    mixed: Tensor = rows.unflatten(-2, (-1, 2))
    return mixed.transpose(-3, -2).contiguous()


def check_source(w: object, name: str, rank: int) -> None:
    require(
        isinstance(w, Tensor), f"{name} must be a tensor", got=type(w).__name__, kind=DTypeError
    )
    assert isinstance(w, Tensor)
    require(
        w.ndim == rank, f"{name} must have {rank} dimensions", got=tuple(w.shape), kind=ShapeError
    )
    require(
        w.dtype in FLOATS,
        f"{name} must be bfloat16, float32 or float16",
        got=w.dtype,
        kind=DTypeError,
    )
    require(
        not w.is_meta,
        f"{name} must have values",
        got="a meta tensor",
        fix='use MoE.empty(..., device="meta") for a layer that waits for a state_dict',
        kind=DeviceError,
    )


def check_pair(w13: Tensor, w2: Tensor, shape: tuple[int, int] | None) -> None:
    """Require one expert's [2I, H] and [H, I], of the shape of those before it."""
    check_source(w13, "w13 of an expert", 2)
    check_source(w2, "w2 of an expert", 2)
    require(
        w13.shape[0] % 2 == 0 and tuple(w2.shape) == (w13.shape[1], w13.shape[0] // 2),
        "w13 must be [2 * intermediate, hidden] and w2 [hidden, intermediate] for each expert",
        got=f"{tuple(w13.shape)} and {tuple(w2.shape)}",
        kind=ShapeError,
    )
    require(
        w13.device == w2.device,
        "w13 and w2 must lie on one device",
        got=f"{w13.device} and {w2.device}",
        kind=DeviceError,
    )
    require(
        shape is None or tuple(w13.shape) == shape,
        f"all experts must have one shape, {shape}",
        got=tuple(w13.shape),
        kind=ShapeError,
    )


def extras(
    recipe: str,
    num_experts: int,
    b13: Tensor | None,
    b2: Tensor | None,
    gate_up: str,
    x_global: float,
    acts_global: float | Tensor,
    device: torch.device,
    scales: str | None = None,
) -> dict[str, Tensor]:
    """Biases in our order and FP32, and NVFP4's global scales of the activations."""
    one_of(gate_up, GATE_UP, "gate_up")
    parts: dict[str, Tensor] = {}
    for name, bias in (("b13", b13), ("b2", b2)):
        if bias is None:
            continue
        require(
            isinstance(bias, Tensor) and bias.is_floating_point() and bias.ndim == 2,
            f"{name} must be a float tensor [E, rows]",
            got=getattr(bias, "shape", type(bias).__name__),
            kind=ShapeError,
        )
        require(
            bool(bias.isfinite().all()), f"{name} must be finite", got="NaN or Inf", kind=RangeError
        )
        parts[name] = bias.detach().to(torch.float32, copy=True).contiguous()
    if "b13" in parts:
        require(
            parts["b13"].shape[1] % 2 == 0,
            "b13 must have 2 * intermediate columns",
            got=tuple(parts["b13"].shape),
            kind=ShapeError,
        )
        parts["b13"] = gate_then_up(parts["b13"][..., None], gate_up)[..., 0]
    factors = {"x_global": x_global, "acts_global": acts_global}
    for name, value in factors.items():
        factor = torch.as_tensor(value, dtype=torch.float32, device=device).detach().clone()
        require(
            bool((factor > 0).all() and factor.isfinite().all()),
            f"{name} must be positive and finite",
            got=factor.tolist(),
            kind=RangeError,
        )
        if recipe_named(recipe).acts.has_global:
            factor = factor.reciprocal() if scales == "divide" else factor
            require(
                scales == "multiply" or bool((factor <= LARGEST_ACTS_GLOBAL).all()),
                f"{name} must multiply: amax / 2688, at most {LARGEST_ACTS_GLOBAL:g}",
                got=factor.tolist(),
                fix="a checkpoint may store its reciprocal (input_global_scale of "
                "compressed-tensors): give 1 / it",
                kind=RangeError,
            )
            parts[name] = factor if name == "x_global" else factor.expand(num_experts).contiguous()
        else:
            require(
                bool((factor == 1).all()),
                f"recipe {recipe} has no {name}",
                got=factor.tolist(),
                fix="leave it out",
                kind=RangeError,
            )
    return parts


def check_extra(
    t: Tensor | None, name: str, shape: tuple[int, ...] | None, *, required: bool
) -> None:
    """Require a float32 tensor of `shape`, or None where it may be missing."""
    if t is None:
        require(shape is None or not required, f"{name} is missing", got=None, kind=ShapeError)
        return
    require(shape is not None, f"this recipe has no {name}", got="one", kind=ShapeError)
    require(t.dtype == torch.float32, f"{name} must be float32", got=t.dtype, kind=DTypeError)
    require(
        tuple(t.shape) == shape,
        f"{name} must have shape {shape}",
        got=tuple(t.shape),
        kind=ShapeError,
    )


def refuse_nan(matrix: Quantized, name: str, first_expert: int = 0) -> None:
    """Require weights without NaN or Inf (a NaN scale, a NaN element); names the first expert."""
    for expert in range(len(matrix)):
        part = matrix[expert]
        if part.spec.scale is Scale.NONE:
            bad = not bool(part.data.isfinite().all())
        else:
            assert part.scale is not None
            bad = _has_nan(part.scale)
            if part.spec.element.name == "e4m3":
                bad = bad or any(_has_nan(rows) for rows in part.data.flatten(0, -2).split(256))
        require(
            not bad,
            f"{name} must be finite",
            got=f"NaN or Inf in expert {first_expert + expert}",
            fix="check the checkpoint; NaN weights would spoil every token they meet",
            kind=RangeError,
        )


# What other libraries store the same bytes as.
_SAME_BYTES: dict[torch.dtype, tuple[Any, ...]] = {
    torch.uint8: (torch.int8, _E8M0, _FP4_PAIRS),
    torch.float8_e4m3fn: _BYTES,
}


def as_dtype(t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A tensor of a state_dict in the dtype that is held: the same bytes, or floats by value."""
    if t.dtype == dtype:
        return t
    same = _SAME_BYTES.get(dtype, ())
    if t.dtype in same:
        return t.view(dtype)
    floats = FLOATS if dtype in FLOATS else ()
    legal = dict.fromkeys(d for d in (dtype, *same, *floats) if d is not None)
    require(
        t.dtype in floats,
        f"{name} must be {' or '.join(map(str, legal))}",
        got=t.dtype,
        fix="quantise with ExpertWeights.quantize: another format is not converted by value",
        kind=DTypeError,
    )
    return t.to(dtype)


def refuse_values(t: Tensor, part: str, name: str) -> None:
    """Refuse NaN, Inf and scales that none can be, in a tensor of experts that is loaded.

    part  which it is: "w13.data", "w2.scale", "b13", ...
    name  what to call it
    """
    is_fp4 = t.dtype == torch.uint8 and part.endswith("data")
    if t.is_meta or is_fp4:
        return
    is_scale = part.endswith(("scale", "_global")) and t.dtype == torch.float32
    each = [_is_legal(one, part, is_scale) for one in (t if t.ndim else t[None])]
    wrong = (~torch.stack(each)).nonzero().flatten().tolist()  # a GPU is waited for once
    require(
        not wrong,
        f"{name} must be finite" + (", and scales positive" if is_scale else ""),
        got=f"otherwise in expert {wrong[0]}" if wrong else "",
        fix="check the checkpoint; NaN weights would spoil every token they meet",
        kind=RangeError,
    )


def _is_legal(one: Tensor, part: str, is_scale: bool) -> Tensor:
    """bool []: whether an expert's tensor is finite, and its scales positive."""
    if one.dtype not in FLOATS:
        rows = one.flatten(0, -2) if one.ndim > 1 else one[None]
        return ~torch.stack([_is_nan(some).any() for some in rows.split(256)]).any()
    ok = one.isfinite().all()
    if is_scale:
        ok = ok & (one >= 0 if part.endswith(".scale") else one > 0).all()
    return ok


def _data(data: object, fmt: Format, name: str) -> Tensor:
    """Stored elements as [E, rows, stored columns] in our dtype, without copying."""
    require(
        isinstance(data, Tensor),
        f"{name} must be a tensor",
        got=type(data).__name__,
        kind=DTypeError,
    )
    assert isinstance(data, Tensor)
    wanted = DATA_DTYPE[fmt.element.name]
    if fmt.element.bits == 4:
        legal: tuple[Any, ...] = (*_BYTES, _FP4_PAIRS)
        require(
            data.dtype in legal,
            f"{name}: packed {fmt.name} must be uint8 or int8, two values a byte",
            got=data.dtype,
            kind=DTypeError,
        )
        data = data.view(torch.uint8)
        if data.ndim == 4:  # gpt-oss: [E, rows, groups, bytes of a group]
            require(
                data.shape[3] == fmt.block[1] // 2,
                f"{name}: blocks must hold {fmt.block[1] // 2} bytes",
                got=tuple(data.shape),
                kind=ShapeError,
            )
            data = data.flatten(2)
    require(
        data.dtype == wanted,
        f"{name} must be {wanted} for {fmt.name}",
        got=data.dtype,
        kind=DTypeError,
    )
    require(
        data.ndim == 3, f"{name} must be [E, rows, columns]", got=tuple(data.shape), kind=ShapeError
    )
    return data


def _scale(scale: object, fmt: Format, name: str) -> Tensor:
    """Scales in our dtype: E8M0 bytes stay bytes, but where FP32 is stored they count by value."""
    require(
        isinstance(scale, Tensor),
        f"{name}: {fmt.name} needs scales",
        got=type(scale).__name__,
        kind=DTypeError,
    )
    assert isinstance(scale, Tensor)
    require(
        scale.ndim == 3, f"{name}: scales must be [E, ...]", got=tuple(scale.shape), kind=ShapeError
    )
    legal = {
        Scale.E8M0: (torch.uint8, _E8M0),
        Scale.E4M3: (torch.float8_e4m3fn,),
        Scale.FP32: (torch.float32, torch.bfloat16, torch.float16, _E8M0),
    }[fmt.scale]
    require(
        scale.dtype in legal,
        f"{name}: scales of {fmt.name} must be {' or '.join(map(str, legal))}",
        got=scale.dtype,
        kind=DTypeError,
    )
    if scale.dtype == _E8M0:
        code = scale.view(torch.uint8)
        return code if fmt.scale is Scale.E8M0 else e8m0_to_float(code)
    if fmt.scale is Scale.FP32:
        require(
            bool((scale >= 0).all() and scale.isfinite().all()),
            f"{name}: scales must be finite and not negative",
            got="others",
            kind=RangeError,
        )
        scale = scale.float()
    return scale


def _global(g: object, fmt: Format, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """NVFP4's global scale: float32 [E], or [E, 2] for gate and up."""
    if not fmt.has_global:
        require(g is None, f"{name}: {fmt.name} has no global scale", got="one", kind=ShapeError)
        return None
    require(
        isinstance(g, Tensor) and g.dtype == torch.float32 and 1 <= g.ndim <= len(shape) - 2,
        f"{name}: {fmt.name} needs a float32 global scale per expert",
        got=getattr(g, "shape", g),
        kind=ShapeError,
    )
    assert isinstance(g, Tensor)
    require(
        bool((g > 0).all() and g.isfinite().all()),
        f"{name}: global scales must be positive and finite",
        got=g.tolist(),
        kind=RangeError,
    )
    return g.detach().clone(memory_format=torch.contiguous_format)  # one may be given for both


def _has_nan(t: Tensor) -> bool:
    return bool(_is_nan(t).any())


def _is_nan(t: Tensor) -> Tensor:
    """NaN in E8M0 codes, E4M3 or FP32 values, read off the bits of one-byte types."""
    if t.dtype == torch.uint8:
        return t == 255
    if t.dtype == torch.float8_e4m3fn:
        return (t.view(torch.uint8) & 0x7F) == 0x7F
    return t.isnan()
