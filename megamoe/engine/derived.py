"""What backends make of weights, once for these bytes: kept with them, and gone with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from megamoe.engine.fingerprint import Seal
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized

# By the bytes of a matrix: what was made from them, and the seal of the bytes and scales it was
# made from (decision 0026). Entries go when the weights go: images hold nothing of the original.
_MADE: Any = WeakIdKeyDictionary()


def known(
    w: Quantized, what: str, find: Callable[[Quantized], Any], other: Quantized | None = None
) -> Any:
    """find(w), found once for these bytes and scales, and the other's, as they are now."""
    parts = tuple(t for q in (w, other) if q is not None for t in q.tensors().values())
    values = _MADE.setdefault(w.data, {})
    refs, seal, value = values.get(what, ((), None, None))
    is_new = seal is None or any(ref() is not t for ref, t in zip(refs, parts, strict=True))
    if is_new or not seal.holds(parts):
        value = find(w)
        values[what] = tuple(map(weakref.ref, parts)), Seal(parts), value
    return value


def verify(*both: ExpertWeights | None) -> None:
    """Refuse experts that were written to, uncounted, after something was made of them."""
    for w in (
        part for weights in both if weights is not None for part in (weights.w13, weights.w2)
    ):
        for refs, seal, _ in _MADE.get(w.data, {}).values():
            parts = [ref() for ref in refs]
            if all(t is not None for t in parts):
                seal.verify(parts)
