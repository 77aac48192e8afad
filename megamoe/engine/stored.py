"""One expert's matrix as a checkpoint stores it: which format it is, and its values in ours."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.engine import checkpoint
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError, require
from megamoe.formats.elements import e8m0_to_float
from megamoe.formats.quantize import FLOATS, dequantize, quantize_into, weight_global_scale
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Format, format_named

_E8M0 = torch.float8_e8m0fnu
_BYTES = (torch.uint8, torch.int8)
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Kind:
    """How values are stored, and which of our recipes takes them."""

    about: str
    recipe: str  # the one that is picked
    format: str | None  # ours with the same bytes; None: read through their values


# fmt: off
KINDS = {
    "float":       Kind("BF16, FP16 or FP32",                   "bf16",  None),
    "fp8_128x128": Kind("FP8, a scale per 128 x 128",           "w8a8",  "fp8_128x128"),
    "fp8_tensor":  Kind("FP8, a scale per matrix",              "w8a8",  "fp8_128x128"),
    "fp8_channel": Kind("FP8, a scale per row, read as BF16",   "bf16",  None),
    "mxfp8":       Kind("MXFP8, read as BF16",                  "bf16",  None),
    "mxfp4":       Kind("MXFP4",                                "w4a16", "mxfp4"),
    "nvfp4":       Kind("NVFP4",                                "nvfp4", "nvfp4"),
}
# fmt: on


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix [rows, columns] in one of KINDS.

    global_scale   NVFP4: float32 scalar that multiplies
    input_scale    NVFP4: float32 scalar, the global scale of the linear's input, or None
    """

    kind: str
    data: Tensor
    scale: Tensor | None = None
    global_scale: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of values."""
        rows, cols = self.data.shape
        return rows, cols * (2 if self.kind in ("mxfp4", "nvfp4") else 1)

    def halves(self, gate_up: str) -> tuple[Stored, Stored]:
        """Gate and up of a fused matrix, whose rows stand split or interleaved."""
        rows = self.shape[0]
        is_block = self.kind == "fp8_128x128"
        require(
            rows % 2 == 0 and not (is_block and (gate_up != "split" or rows % (2 * BLOCK))),
            "gate and up must be halves that share no scale",
            got=f"{rows} rows, {gate_up}, {KINDS[self.kind].about}",
            kind=ShapeError,
        )
        each = []
        for half in range(2):
            picked = {}
            for name in ("data", "scale"):
                t = getattr(self, name)
                if t is None or (name == "scale" and self.kind == "fp8_tensor"):
                    continue
                picked[name] = t.chunk(2)[half] if gate_up == "split" else t[half::2]
            each.append(replace(self, **picked))
        return each[0], each[1]

    def put(self, out: Quantized, name: str, expert: int) -> None:
        """Write the values to `out` [1, rows, columns]: bytes where formats agree, else rounded."""
        fmt, title = out.spec, f"{name} of expert {expert}"
        require(
            (1, *self.shape) == out.shape, f"{title} must have the shape of the first expert's",
            got=f"{self.shape} for {out.shape[1:]}", kind=ShapeError,
        )  # fmt: skip
        self._refuse_scales(title)
        if fmt.name == KINDS[self.kind].format:
            out.data[0].copy_(self.data.view(out.data.dtype))
            assert out.scale is not None
            out.scale[0].copy_(self._scale(fmt, out.scale.shape[1:]))
            if out.global_scale is not None and self.global_scale is not None:
                out.global_scale.copy_(self.global_scale)
        else:
            source = self.values()[None].to(out.device)
            require(
                bool(source.isfinite().all()), f"{name} must be finite",
                got=f"NaN or Inf in expert {expert}", fix="check the checkpoint", kind=RangeError,
            )  # fmt: skip
            if out.global_scale is not None:
                out.global_scale.copy_(weight_global_scale(source))
            quantize_into(source, out)
        checkpoint.refuse_nan(out, name, first_expert=expert)

    def _refuse_scales(self, title: str) -> None:
        """Refuse scales that are negative, not finite, or so large that they should divide."""
        if self.scale is None or self.kind.startswith("mx"):
            return
        g = 1.0 if self.global_scale is None else float(self.global_scale)
        scale = self.scale
        scale = e8m0_to_float(scale.view(torch.uint8)) if scale.dtype == _E8M0 else scale.float()
        require(
            bool(((scale >= 0) & scale.isfinite()).all()) and 0 < g < float("inf"),
            f"{title}: scales must be finite and not negative, global ones positive",
            got=f"scales {scale.amin():.3g} to {scale.amax():.3g}, global scale {g:.3g}",
            kind=RangeError,
        )
        element = 6.0 if self.kind == "nvfp4" else 448.0
        checkpoint.refuse_too_large(element * float(scale.amax()) * g, title)

    def values(self) -> Tensor:
        """Float values; exact, but for FP8 with FP32 scales, which is rounded to BF16 later."""
        if self.kind == "float":
            return self.data
        assert self.scale is not None
        if self.kind in ("fp8_channel", "fp8_tensor"):
            return self.data.float() * self.scale.float().reshape(-1, 1)
        fmt = format_named("mxfp8" if self.kind == "mxfp8" else str(KINDS[self.kind].format))
        blocks = tuple(self.scale.shape)
        data = self.data.view(torch.uint8) if fmt.element.bits == 4 else self.data
        g = None if self.global_scale is None else self.global_scale[None]
        return dequantize(
            Quantized(data[None], self._scale(fmt, blocks)[None], fmt.name, (1, *self.shape), g)
        )[0]

    def _scale(self, fmt: Format, shape: tuple[int, ...]) -> Tensor:
        """Scales in the dtype of a format of ours."""
        assert self.scale is not None
        if fmt.name == "fp8_128x128":
            scale = self.scale
            scale = e8m0_to_float(scale.view(torch.uint8)) if scale.dtype == _E8M0 else scale
            return scale.float().reshape(-1)[:1].expand(shape) if scale.numel() == 1 else scale
        return self.scale.view(torch.uint8) if self.scale.dtype in (_E8M0, *_BYTES) else self.scale


def read(name: str, data: Tensor, scale: Tensor | None, global_scale: Tensor | None) -> Stored:
    """What a matrix is, by its dtype and the dtype and shape of its scales; refuses the rest."""
    require(data.ndim == 2, f"{name} must be a matrix", got=tuple(data.shape), kind=ShapeError)
    if scale is not None and scale.ndim == 4 and scale.shape[1] == scale.shape[3] == 1:
        scale = scale[:, 0, :, 0]  # modelopt's blocks, [rows, 1, columns, 1]
    kind = _kind(data, scale, global_scale)
    require(
        bool(kind),
        f"{name} must be one of: " + "; ".join(k.about for k in KINDS.values()),
        got=f"{_look(data)}, scales {_look(scale)}, global scale {_look(global_scale)}",
        kind=NotAvailable if data.dtype == torch.int32 else DTypeError,
    )
    require(
        kind == "nvfp4" or global_scale is None, f"{name}: {KINDS[kind].about} has no global scale",
        got="one", fix="this format is not built", kind=NotAvailable,
    )  # fmt: skip
    g = None if global_scale is None else global_scale.float().reshape(())
    return Stored(kind, data, scale, g)


def _kind(data: Tensor, scale: Tensor | None, global_scale: Tensor | None) -> str:
    rows, cols = data.shape
    if data.dtype in FLOATS:
        return "float" if scale is None else ""
    if scale is None:
        return ""
    shape, is_code = tuple(scale.shape), scale.dtype in (torch.uint8, _E8M0)
    if data.dtype in _BYTES:
        if is_code and shape == (rows, cols // 16):
            return "mxfp4"
        is_nvfp4 = scale.dtype == torch.float8_e4m3fn and shape == (rows, cols // 8)
        return "nvfp4" if is_nvfp4 and global_scale is not None else ""
    if data.dtype != torch.float8_e4m3fn:
        return ""
    if is_code and shape == (rows, cols // 32):
        return "mxfp8"
    if scale.dtype not in (*FLOATS, _E8M0):
        return ""
    if scale.numel() == 1:
        return "fp8_tensor"
    if shape == (-(-rows // BLOCK), -(-cols // BLOCK)):
        return "fp8_128x128"
    return "fp8_channel" if shape in ((rows, 1), (rows,)) and scale.dtype != _E8M0 else ""


def _look(t: Tensor | None) -> str:
    return "none" if t is None else f"{t.dtype} {tuple(t.shape)}"
