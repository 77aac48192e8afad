"""Quantized: a tensor in one of the formats, with its scales, its logical shape, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.errors import DeviceError, DTypeError, RangeError, ShapeError, require
from megamoe.formats.spec import Format, Scale, format_named

DATA_DTYPE = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8}
SCALE_DTYPE = {
    Scale.E8M0: torch.uint8,
    Scale.E4M3: torch.float8_e4m3fn,
    Scale.FP32: torch.float32,
}


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """Values in `format`.

    data          [..., k] (E2M1: [..., k / 2] bytes, the even column in the low half)
    scale         one per block over the last two dimensions, or None where the format has none
    format        its name: "mxfp4", "fp8_1x128", ...
    shape         the logical shape
    global_scale  FP32, NVFP4 only: its shape is a prefix of `shape`, one factor per leading index
    """

    data: Tensor
    scale: Tensor | None
    format: str
    shape: tuple[int, ...]
    global_scale: Tensor | None = None

    def __repr__(self) -> str:
        return f"Quantized({self.format}, {self.shape}, on {self.data.device})"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        fmt = self.spec
        check_shape(self.shape, fmt)
        _check(self.data, "data", DATA_DTYPE[fmt.element.name], data_shape(self.shape, fmt))
        if fmt.scale is Scale.NONE:
            require(self.scale is None, f"{fmt.name} has no scale", got="a scale", kind=ShapeError)
        else:
            _check(self.scale, "scale", SCALE_DTYPE[fmt.scale], scale_shape(self.shape, fmt))
        if not fmt.has_global:
            require(
                self.global_scale is None,
                f"{fmt.name} has no global scale",
                got="a global scale",
                kind=ShapeError,
            )
        else:
            scale = self.global_scale
            require(
                isinstance(scale, Tensor) and scale.dtype == torch.float32,
                f"{fmt.name} needs a float32 global scale",
                got=getattr(scale, "dtype", scale),
                kind=DTypeError,
            )
            assert scale is not None
            require(
                scale.ndim < len(self.shape) and tuple(scale.shape) == self.shape[: scale.ndim],
                "the global scale's shape must be a prefix of the tensor's shape",
                got=f"{tuple(scale.shape)} for {self.shape}",
                kind=ShapeError,
            )
        devices = {t.device for t in self.tensors().values()}
        require(
            len(devices) == 1,
            "data and scales must lie on one device",
            got=sorted(map(str, devices)),
            kind=DeviceError,
        )

    @property
    def spec(self) -> Format:
        """The row of the formats table."""
        return format_named(self.format)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of storage, scales included."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by field name, those that are None left out."""
        named = {"data": self.data, "scale": self.scale, "global_scale": self.global_scale}
        return {name: t for name, t in named.items() if t is not None}

    def to(self, device: torch.device | str) -> Quantized:
        """The same values on `device`."""
        return replace(self, **{name: t.to(device) for name, t in self.tensors().items()})

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, idx: int | slice) -> Quantized:
        """Views of one or several leading entries (experts, tokens). Blocks are never cut."""
        spare = len(self.shape) - (2 if self.spec.block[0] > 1 else 1)
        require(
            spare >= 1,
            "only dimensions outside the blocks can be indexed",
            got=f"shape {self.shape} in blocks of {self.spec.block}",
            kind=ShapeError,
        )
        require(
            isinstance(idx, int) or (isinstance(idx, slice) and (idx.step or 1) > 0),
            "an index must be an integer or a forward slice",
            got=idx,
            kind=RangeError,
        )
        if isinstance(idx, int):
            shape = self.shape[1:]
        else:
            shape = (len(range(*idx.indices(self.shape[0]))), *self.shape[1:])
        picked = {
            name: t if name == "global_scale" and t.ndim == 0 else t[idx]
            for name, t in self.tensors().items()
        }
        return replace(self, shape=shape, **picked)


def empty(shape: tuple[int, ...], fmt: Format, device: torch.device) -> Quantized:
    """Uninitialised values, to be filled; global scales are 1, one per leading index."""
    dtype = DATA_DTYPE[fmt.element.name]
    data = torch.empty(data_shape(shape, fmt), dtype=dtype, device=device)
    if fmt.scale is Scale.NONE:
        return Quantized(data, None, fmt.name, shape)
    scale = torch.empty(scale_shape(shape, fmt), dtype=SCALE_DTYPE[fmt.scale], device=device)
    g = torch.ones(shape[:1], dtype=torch.float32, device=device) if fmt.has_global else None
    return Quantized(data, scale, fmt.name, shape, g)


def check_shape(shape: tuple[int, ...], fmt: Format) -> None:
    """Require a shape that `fmt` can store."""
    rank = 2 if fmt.block[0] > 1 else 1
    require(
        len(shape) >= rank,
        f"{fmt.name} needs at least {rank} dimension(s)",
        got=f"shape {shape}",
        kind=ShapeError,
    )
    require(
        shape[-1] > 0 and shape[-1] % fmt.width_multiple == 0,
        f"the last dimension must be a positive multiple of {fmt.width_multiple} for {fmt.name}",
        got=f"shape {shape}",
        fix="pad it with zeros",
        kind=ShapeError,
    )


def data_shape(shape: tuple[int, ...], fmt: Format) -> tuple[int, ...]:
    """Shape of the stored elements."""
    return (*shape[:-1], shape[-1] // 2) if fmt.element.bits == 4 else tuple(shape)


def scale_shape(shape: tuple[int, ...], fmt: Format) -> tuple[int, ...]:
    """Shape of the scales: one per block, short last blocks counted whole."""
    rows, cols = fmt.block
    last = -(-shape[-1] // cols)
    return (*shape[:-1], last) if rows == 1 else (*shape[:-2], -(-shape[-2] // rows), last)


def _check(t: object, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    require(
        isinstance(t, Tensor), f"{name} must be a tensor", got=type(t).__name__, kind=DTypeError
    )
    assert isinstance(t, Tensor)
    require(t.dtype == dtype, f"{name} must be {dtype}", got=t.dtype, kind=DTypeError)
    require(
        tuple(t.shape) == shape,
        f"{name} must have shape {shape}",
        got=tuple(t.shape),
        kind=ShapeError,
    )
