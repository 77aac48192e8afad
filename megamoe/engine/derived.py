"""What backends make of weights, once for these bytes: kept with them, and gone with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megamoe.engine.fingerprint import Seal
from megamoe.engine.status import is_capturing
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.formats.quantized import Quantized


@dataclass(slots=True)
class Entry:
    """What was made of a matrix.

    refs   its tensors
    seal   of the bytes and scales that it was made from (decision 0026)
    write  write(value, w): the same of other bytes, where the value lies; None: it has no memory
    """

    refs: Sequence[weakref.ref[Tensor]]
    seal: Seal
    value: Any
    write: Callable[[Any, Quantized], None] | None


# By the bytes of a matrix. Entries go when the weights go: images hold nothing of the original.
_DERIVED: Any = WeakIdKeyDictionary()


def known(
    w: Quantized, what: str, find: Callable[[Quantized], Any],
    write: Callable[[Any, Quantized], None] | None = None,
) -> Any:  # fmt: skip
    """find(w), found once for these bytes and scales as they are now.

    write  brings what was found up to date where it lies, so that graphs which read it stay valid
    """
    parts = tuple(w.tensors().values())
    values = _DERIVED.setdefault(w.data, {})
    entry = values.get(what)
    is_there = entry is not None and all(r() is t for r, t in zip(entry.refs, parts, strict=True))
    if is_there and entry.seal.holds(parts):
        return entry.value
    require(
        not is_capturing(w.device),
        "a capture must find weights as its kernels read them",
        got="weights that no call has read since they were made or written to",
        fix="make the call once before the capture",
        kind=NotAvailable,
    )
    with torch.no_grad(), torch.inference_mode(False):  # what is written to later must be ordinary
        if is_there and write is not None:
            write(entry.value, w)
            entry.seal = Seal(parts)
        else:
            entry = Entry(tuple(map(weakref.ref, parts)), Seal(parts), find(w), write)
            values[what] = entry
    return entry.value


def renew(w: Quantized) -> None:
    """After a write to weights: what was made of them is made anew, where it lies."""
    values, parts = _DERIVED.get(w.data, {}), tuple(w.tensors().values())
    for what, entry in list(values.items()):
        if entry.write is None:
            del values[what]
        else:
            with torch.no_grad(), torch.inference_mode(False):
                entry.write(entry.value, w)
            entry.seal = Seal(parts)


def is_true(w: Quantized, what: str) -> bool:
    """Whether this was found of a matrix, and is true."""
    entry = _DERIVED.get(w.data, {}).get(what)
    return entry is not None and bool(entry.value)


def has_changed(*both: ExpertWeights | None) -> bool:
    """Whether somebody wrote to experts after something was made of them."""
    return any(not entry.seal.holds(parts) for entry, parts in _each(*both))


def verify(*both: ExpertWeights | None) -> None:
    """Refuse experts that were written to, uncounted, after something was made of them."""
    for entry, parts in _each(*both):
        entry.seal.verify(parts)


def _each(*both: ExpertWeights | None) -> list[tuple[Entry, list[Tensor]]]:
    """All that was made of experts, and the tensors that it was made from."""
    entries = []
    for w in (part for one in both if one is not None for part in (one.w13, one.w2)):
        for entry in _DERIVED.get(w.data, {}).values():
            parts = [t for ref in entry.refs if (t := ref()) is not None]
            if len(parts) == len(entry.refs):
                entries.append((entry, parts))
    return entries
