"""Experts of a transformers module that the layer holds alone: one copy (docs/transformers.md).

The module's class becomes a subclass of its own, of the same name: its parameters are properties
that bring the tensors back as they were, bit for bit; so do state_dict and `save_pretrained`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.engine.fingerprint import counter_of
from megamoe.engine.layer import MoE
from megamoe.errors import NotAvailable, RangeError, require
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Scale
from megamoe.integrations.transformers_gate import Asked

TAKEN = "megamoe_taken"  # attribute of a module


class Form(NamedTuple):
    """How a module keeps its experts."""

    is_transposed: bool
    gate_up: str


@dataclass(slots=True)
class Taken:
    """The layer of a module's experts, and how to bring its parameters back.

    key         the implementation that took them
    parameters  the module's by name: the objects, which hold nothing now
    like        what they were, without memory
    masks       whether ids may be of other ranks' experts
    """

    key: Any
    layer: MoE
    form: Form
    parameters: dict[str, nn.Parameter]
    like: dict[str, Tensor]
    masks: bool = True
    lent: list[tuple[StorageWeakRef, Tensor, int]] = field(default_factory=list)
    gate: Asked | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module has lent nothing yet; a weak reference has one owner."""
        return Taken, (self.key, self.layer, self.form, self.parameters, self.like, self.masks)

    def tensor(self, name: str) -> Tensor:
        """A parameter as it was: a view of the layer's memory, or a copy not to be written to."""
        t = tensor_of(self.layer, self.form, name, self.like[name])
        held = {x.untyped_storage().data_ptr() for x in self.layer.weights.held().values()}
        if t.untyped_storage().data_ptr() not in held:
            counter = counter_of(t)
            ref = StorageWeakRef(t.untyped_storage())
            self.lent.append((ref, counter, counter._version))
        return t

    def refuse_changed(self, module: nn.Module) -> None:
        """Raise if somebody wrote to a copy, or changed what the gate reads."""
        if self.gate is None:
            self.gate = Asked(module)
        require(
            self.gate.holds(module),
            "experts that were taken run as they were taken",
            got="another gate: an attribute of the module has changed",
            fix="give_back(model) first",
            kind=NotAvailable,
        )
        if self.lent:
            self.refuse_written()

    def refuse_written(self) -> None:
        """Raise if somebody wrote to a copy."""
        require(
            all(counter._version == version for _, counter, version in self.lent),
            "parameters of experts that were taken are copies, which nothing reads again",
            got="one that was written to",
            fix="give_back(model) first, or write with layer.refresh(...)",
            kind=RangeError,
        )
        self.lent = [one for one in self.lent if not one[0].expired()]


def tensor_of(layer: MoE, form: Form, name: str, like: Tensor) -> Tensor:
    """A parameter of a module out of its layer, of the shape and dtype of `like`."""
    w = layer.weights
    is_gated = name.startswith("gate_up")
    if name.endswith("bias"):
        bias = w.b13 if is_gated else w.b2
        assert bias is not None
        rows = bias[..., None]
    else:
        matrix = w.w13 if is_gated else w.w2
        rows = _scales(matrix, like) if name.endswith("scale_inv") else _values(matrix)
    shape = list(like.shape)
    if name.endswith("bias"):
        shape = [*shape, 1]
    elif form.is_transposed:
        shape = [shape[0], shape[2], shape[1]]
    if is_gated:  # widths may have been padded
        rows = rows[:, :, : shape[1] // 2, : shape[2]]
        rows = rows.flatten(1, 2) if form.gate_up == "split" else rows.transpose(1, 2).flatten(1, 2)
    else:
        rows = rows[:, : shape[1], : shape[2]]
    if name.endswith("bias"):
        rows = rows[..., 0]
    elif form.is_transposed:
        rows = rows.transpose(1, 2).contiguous()
    if rows.dtype != like.dtype:
        is_bytes = like.dtype.itemsize == rows.dtype.itemsize == 1
        rows = rows.contiguous().view(like.dtype) if is_bytes else rows.to(like.dtype)
    return rows


def _values(matrix: Quantized) -> Tensor:
    return matrix.data


def _scales(matrix: Quantized, like: Tensor) -> Tensor:
    scale = matrix.scale
    assert scale is not None
    if matrix.spec.scale is Scale.E8M0:
        if like.dtype.itemsize > 1:  # powers of two in floats
            scale = (scale.int() << 23).view(torch.float32)
        return scale
    if like.dtype.itemsize == 1:  # E8M0, taken by value
        scale = (scale.view(torch.int32) >> 23).to(torch.uint8)
    wanted = like.shape[1] // 2 if scale.ndim == 4 else like.shape[1]
    return scale[..., :wanted, : like.shape[2]]  # one per matrix is held as one per block


def take(
    module: nn.Module,
    layer: MoE,
    key: Any,
    form: Form,
    names: tuple[str, ...],
    *,
    masks: bool = True,
) -> None:
    """Let a layer that was made of a module hold its experts alone.

    names  of the parameters that the layer was made of
    masks       whether ids may be of other ranks' experts
    """
    parameters = {n: p for n in names if isinstance(p := module._parameters.get(n), nn.Parameter)}
    like = {n: torch.empty_like(p, device="meta") for n, p in parameters.items()}
    for name, p in parameters.items():
        require(
            _same(tensor_of(layer, form, name, like[name]), p.detach()),
            "experts that are taken must come back bit for bit",
            got=f"{name} in {p.dtype}, which {layer.weights.recipe} rounds",
            fix="load the model in bfloat16 or quantised and take it in its own format, or leave "
            "take out: the layer's experts then stand beside the module's",
            kind=NotAvailable,
        )
    for name, p in parameters.items():
        p.data = torch.empty(0, dtype=p.dtype, device=p.device)
        del module._parameters[name]
    taken = Taken(key, layer, form, parameters, like, masks)
    object.__setattr__(module, TAKEN, taken)
    theirs: Any = type(module)
    module.__class__ = _class_of(theirs, tuple(parameters))
    taken.gate = Asked(module)


def give_back(module: nn.Module) -> None:
    """Make a module what it was before `take`."""
    taken: Taken = module.__dict__[TAKEN]
    taken.refuse_written()
    back = {name: taken.tensor(name).clone() for name in taken.parameters}
    module.__class__ = type(module).__mro__[1]
    del module.__dict__[TAKEN]
    for name, t in back.items():
        p = taken.parameters[name]
        p.data = t
        module._parameters[name] = p


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, an expert at a time."""
    return a.shape == b.shape and all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )


@functools.cache
def _class_of(theirs: Any, names: tuple[str, ...]) -> Any:
    """A subclass of a module's class without these parameters."""

    def save(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        theirs._save_to_state_dict(self, destination, prefix, keep_vars)
        for name in names:
            destination[prefix + name] = getattr(self, TAKEN).tensor(name)

    def load(self: Any, *args: Any) -> None:
        taken: Taken = getattr(self, TAKEN)
        give_back(self)
        theirs._load_from_state_dict(self, *args)
        taken.key.take(self, taken.layer.top_k)

    def apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        getattr(self, TAKEN).layer._apply(fn)
        return theirs._apply(self, fn, recurse)

    def train(self: Any, mode: bool = True) -> Any:
        require(
            not mode,
            "experts that were taken are for inference",
            got="train()",
            fix="give_back(model) first",
            kind=NotAvailable,
        )
        return theirs.train(self, mode)

    def parameter(name: str) -> property:
        return property(lambda self: getattr(self, TAKEN).tensor(name))

    own: dict[str, Any] = {name: parameter(name) for name in names}
    own |= {
        "_save_to_state_dict": save, "_load_from_state_dict": load, "_apply": apply, "train": train,
        "__module__": theirs.__module__, "__qualname__": theirs.__qualname__,
    }  # fmt: skip
    return type(theirs.__name__, (theirs,), own)
