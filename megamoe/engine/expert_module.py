"""ExpertModule: the experts of a layer as a torch module."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import is_
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from megamoe.engine import aliases, checkpoint
from megamoe.engine.fingerprint import counted
from megamoe.engine.packed import TENSORS, PackedMatrix
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require


class ExpertModule(nn.Module):
    """ExpertWeights as buffers, so that a model's state_dict and device moves reach them.

    Images are buffers too, of names of their own that no state_dict has: it has the canonical
    tensors, unpacked, under the same names as on any other machine.
    """

    alive: ClassVar[WeakSet[ExpertModule]] = WeakSet()

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        self.owns = False  # the caller's tensors, which others may hold too
        self.was_loaded = False  # since the layer last looked
        self.is_blank = False  # zeros of `MoE.empty`, into which nothing was loaded yet
        self.take(weights)
        self.alive.add(self)

    def require_own_memory(self) -> None:
        """Refuse to write to experts that another layer has too: its results would change."""
        is_shared = self._is_shared()
        if is_shared:  # by a layer that is gone, and waits for the collector?
            gc.collect()
            is_shared = self._is_shared()
        require(
            not is_shared,
            "experts that are written must belong to one layer",
            got="another layer that was built from the same weights",
            fix="build each layer from tensors of its own (weights.take copies experts)",
            kind=NotAvailable,
        )

    def _is_shared(self) -> bool:
        """Whether another module has bytes of these matrices or biases."""
        mine = self._written()
        own = {t.untyped_storage().data_ptr() for t in mine}
        others = (t for module in list(self.alive) if module is not self for t in module._written())
        near = [t for t in others if t.untyped_storage().data_ptr() in own]
        return any(aliases.share(t, other) for t in mine for other in near)

    def _written(self) -> list[Tensor]:
        """What a refresh may write to."""
        fixed = ("x_global", "acts_global")
        return [t for key, t in self._buffers.items() if t is not None and key not in fixed]

    def take(self, weights: ExpertWeights) -> None:
        """Hold these experts from now on."""
        self._recipe = weights.recipe
        self._names = {name.replace(".", "_"): name for name in weights.held()}
        self._buffers.clear()
        self._non_persistent_buffers_set.clear()
        for name, t in weights.held().items():
            is_image = name.partition(".")[2] in TENSORS
            self.register_buffer(name.replace(".", "_"), t, persistent=not is_image)
        self._weights: ExpertWeights | None = weights
        self._built = tuple(self._buffers.values())  # what `_weights` were made of
        # The experts may come to hold others; compiled models pass the buffers, whose matrices know
        # what they were packed from.
        self._of_buffers: tuple[PackedMatrix, ...] = tuple(
            part for part in (weights.w13, weights.w2) if isinstance(part, PackedMatrix)
        )

    @property
    def weights(self) -> ExpertWeights:
        """The experts that the buffers are now."""
        return self.look()

    @property
    def last(self) -> ExpertWeights:
        """The same as of the last look."""
        return self._weights or self.look()

    def look(self) -> ExpertWeights:
        """The experts that the buffers are now: somebody may have put others in their place."""
        weights = self._weights
        if weights is None or not all(map(is_, self._buffers.values(), self._built)):
            return self._rebuilt()
        return weights

    def _rebuilt(self) -> ExpertWeights:
        """Experts of buffers that were loaded, moved or replaced; dense ones become the buffers."""
        require(
            not self._of_buffers,
            "packed experts must be replaced by load_state_dict or refresh",
            got="other tensors in place of the buffers of images",
            fix="make another layer of the other experts",
            kind=NotAvailable,
        )
        tensors = {name: self.get_buffer(key) for key, name in self._names.items()}
        weights = ExpertWeights.from_state_dict(tensors, self._recipe)
        self.take(weights)
        self.was_loaded = True
        return weights

    def each(self) -> list[Tensor]:
        """The tensors, by place: two may be one, which `buffers()` would name once."""
        return [t for _, t in self.named_buffers(remove_duplicate=False)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertModule:
        """Follow moves between devices, never casts: the bytes are the weights."""

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        weights = self.weights
        if weights.is_packed:
            device = fn(torch.empty(0, dtype=torch.int32, device=weights.device)).device
            if device != weights.device:
                self.take(weights.to(device))
            return self
        self._weights, self._built, self._of_buffers = None, (), ()
        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self.weights.is_packed:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for name, t in self.weights.state_dict().items():
            destination[prefix + name.replace(".", "_")] = t

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        """Load into tensors of this module's own: those it was built from may be others' too."""
        self.was_loaded = True
        self.is_blank &= not any(name.startswith(prefix) for name in state_dict)
        if self._of_buffers:
            self._load_packed(state_dict, prefix, local_metadata, *args)
            return
        if not self.owns:
            for key in self._names:
                self._buffers[key] = self.get_buffer(key).clone()
        mine = self._as_held(state_dict, prefix)
        self._weights, self._built, self._of_buffers = (
            None,
            (),
            (),
        )  # load_state_dict(assign=True) replaces tensors
        super()._load_from_state_dict(mine, prefix, local_metadata, *args)
        # What is assigned are the caller's tensors: the next load may not write to them.
        self.owns = not local_metadata.get("assign_to_params_buffers", False)

    def _as_held(self, state_dict: Any, prefix: str) -> dict[str, Any]:
        """This module's tensors of a state_dict, in its dtypes; refuses other ones, and NaN."""
        mine = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        for key, name in self._names.items():
            t = mine.get(prefix + key)
            if isinstance(t, Tensor):
                held = checkpoint.as_dtype(t.detach(), self.get_buffer(key).dtype, prefix + key)
                checkpoint.refuse_values(held, name, prefix + key)
                mine[prefix + key] = held
        return mine

    def _load_packed(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        """From wherever the tensors lie into images, expert by expert: no whole copy is made."""
        from megamoe.engine import images

        before = self.weights
        try:
            self.take(_without_memory(before))
            metadata = {**local_metadata, "assign_to_params_buffers": True}
            *_, errors = args
            num_errors = len(errors)
            mine = self._as_held(state_dict, prefix)
            super()._load_from_state_dict(mine, prefix, metadata, *args)
            if len(errors) > num_errors:
                self.take(before)
                return
            tensors = {name: self.get_buffer(key) for key, name in self._names.items()}
            if any(t.is_meta for t in tensors.values()):
                had = before.state_dict()
                tensors = {name: had[name] if t.is_meta else t for name, t in tensors.items()}
            is_assigned = local_metadata.get("assign_to_params_buffers", False)
            where = tensors["w13.data"].device
            tensors = {name: counted(t.detach()).to(where) for name, t in tensors.items()}
            loaded = ExpertWeights.from_state_dict(tensors, self._recipe)
            if not is_assigned and not images.why_not(loaded):
                on = images.put if self.owns else _put_beside
                loaded = on(before, loaded)
            elif not is_assigned:
                loaded = loaded.to(before.device)
        except BaseException:
            self.take(before)
            raise
        self.owns = not is_assigned
        self.take(loaded)

    def extra_repr(self) -> str:
        w = self.weights
        return (
            f"{w.recipe}, {w.num_experts} of {w.hidden} x {w.intermediate}, {megabytes(w.nbytes)}"
            + (", packed" if w.is_packed else "")
        )


@contextmanager
def letting_go(*modules: ExpertModule | None) -> Iterator[None]:
    """These modules hold no tensors inside, so that experts can be packed where they lie; if that
    ends in an error, they hold the same experts again."""
    mine = [(module, module.weights) for module in modules if module is not None]
    for module, weights in mine:
        module._buffers.clear()
        module._of_buffers, module._built, module._weights = (), (), weights
    try:
        yield
    except BaseException:
        for module, weights in mine:
            module.take(weights)
        raise


def _without_memory(weights: ExpertWeights) -> ExpertWeights:
    """Canonical experts of the same shapes, to be replaced by what is loaded."""
    w = weights
    bare = ExpertWeights.empty(w.recipe, w.num_experts, w.hidden, w.intermediate, "meta")
    parts: dict[str, Any] = {
        name: torch.empty_like(t, device="meta")
        for name in ("b13", "b2", "x_global", "acts_global")
        if (t := getattr(w, name)) is not None
    }
    for name in ("w13", "w2"):
        g = getattr(w, name).global_scale
        if g is not None:
            g = torch.empty_like(g, device="meta")
            parts[name] = replace(getattr(bare, name), global_scale=g)
    return replace(bare, **parts)


def _put_beside(weights: ExpertWeights, other: ExpertWeights) -> ExpertWeights:
    from megamoe.engine import images

    return images.hold_on(weights.device, other, None)[0]


def megabytes(num_bytes: int) -> str:
    """For people: 0.4 MB, 428 MB.

    >>> megabytes(400_000), megabytes(427_819_008)
    ('0.4 MB', '428 MB')
    """
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.1f} MB"
