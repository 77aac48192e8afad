"""Handles of transformed weights that the engine holds alone: they have a shape and no bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe.errors import NotAvailable, RangeError, require

# What a handle answers; all else would read or write bytes that are not there.
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "is_leaf",
               "requires_grad", "grad", "grad_fn", "itemsize", "nbytes")  # fmt: skip
_METHODS = ("size", "stride", "dim", "numel", "nelement", "element_size", "is_contiguous",
            "is_inference", "is_floating_point", "is_complex", "requires_grad_", "detach",
            "__len__", "__hash__")  # fmt: skip
_METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES]
    + [getattr(Tensor, name) for name in _METHODS]
)
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Handle(Tensor):
    """A weight of `transform_weights_for_mega_moe(..., keep=False)`; calls take it as any other.

    holder  the engine's experts, which live as long as a handle of them
    role    its place: "l1", "l1_scale", "l2" or "l2_scale"
    """

    holder: Any
    role: str

    @staticmethod
    def of(like: Tensor, holder: Any, role: str) -> Handle:
        """A handle that looks like a tensor."""
        with torch.inference_mode(False):
            one: Handle = Tensor._make_wrapper_subclass(
                Handle, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
            )
        one.holder, one.role = holder, role
        return one

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Handle({self.role}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _METADATA:
            _refuse(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _ALIASES:
            _refuse(func)
        one = args[0]
        return Handle.of(one, one.holder, one.role)


def holder_of(tensors: dict[str, Tensor | None]) -> Any:
    """What holds the weights of a call, by their roles; None: they have bytes of their own."""
    held = {role: t for role, t in tensors.items() if isinstance(t, Handle)}
    if not held:
        return None
    holders = {id(t.holder) for t in held.values()}
    ok = len(holders) == 1 and all(
        t is None or (role in held and held[role].role == role) for role, t in tensors.items()
    )
    require(
        ok, "weights that the engine holds must be those of one transform, each in its place",
        got=[repr(t) if isinstance(t, Handle) else "others" for t in tensors.values()],
        kind=RangeError,
    )  # fmt: skip
    return next(iter(held.values())).holder


def _refuse(func: Any) -> None:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    if name == "__get__" and owner is not None:
        name = owner.__name__
    raise NotAvailable(
        "weights that were transformed with keep=False have no bytes to read or write; "
        f"got {name}; transform new ones, or leave keep=False out"
    )
