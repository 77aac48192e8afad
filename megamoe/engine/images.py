"""FP4 experts as Hopper's images: which, when, and that there is one copy (decision 0028).

The first call, or the layer that is built, packs an `ExpertWeights`; it holds its images from then
on and lets the canonical bytes go. Which image it is depends on the values alone.
"""

from __future__ import annotations

import weakref
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megamoe.engine import packing
from megamoe.engine.fingerprint import Seal, counted
from megamoe.engine.interface import Prepared
from megamoe.engine.packed import PackedMatrix, Source, empty_matrix, fill, parts_of
from megamoe.engine.planning import why_unlike
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Scale, recipe_named
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.weights import pack
from megamoe.kernels.hopper.weights.pack import Facts, Packed, joined, kind_of
from megamoe.planner.numerics import decodes_to_e4m3, image_of

MATRICES = ("w13", "w2")
NO_IMAGE = Facts(can_be_placed=False)  # read as they are
LIE_APART = "images of routed and shared experts that were packed apart"


class Image(NamedTuple):
    """Which image the matrices of one launch are: it has one decoder."""

    to_e4m3: bool
    is_placed: bool

    def suits(self, part: Quantized) -> bool:
        """Whether a matrix is held as one that this launch can read."""
        if not isinstance(part, PackedMatrix):
            return False
        wanted = _kind_of(self, part)
        return part.kind == wanted or (part.kind == "mx_image" and wanted == "placed_image")


def prepared(weights: ExpertWeights) -> Prepared:
    """The weights as kernels read them; FP4 is packed now if it was not, and held so."""
    known = facts(weights)
    _check(weights.recipe, known)
    image = _image_of(weights.recipe, known)
    if is_image(weights):
        _alone(weights, image)
    how = launch.arithmetic(weights.recipe, fits_e4m3=image.to_e4m3)
    return Prepared(_packed(weights.w13), _packed(weights.w2), how)


def with_shared(weights: ExpertWeights, shared: ExpertWeights) -> Prepared:
    """Both as the experts of one launch (`why_apart` is empty); the shared ones are the last."""
    if not (weights.is_packed or shared.is_packed):
        hold(weights, shared)
    how = launch.arithmetic(weights.recipe, fits_e4m3=can_be_e4m3(weights))
    both = [joined(_packed(getattr(weights, n)), _packed(getattr(shared, n))) for n in MATRICES]
    assert both[0] is not None and both[1] is not None
    return Prepared(both[0], both[1], how)


def hold(
    weights: ExpertWeights, shared: ExpertWeights | None = None
) -> tuple[ExpertWeights, ExpertWeights | None]:
    """The experts as a layer holds them on Hopper: images of FP4, and nothing beside them.

    Experts in canonical bytes hold images from now on. Shared experts that run in the launches of
    the others lie after them in one memory; of those that were packed before, that is a copy.
    """
    if shared is None or why_apart(weights, shared):
        both = [w for w in (weights, shared) if w is not None and is_image(w)]
        for w in both:
            _alone(w, _image_of(w.recipe, facts(w)))
        return weights, shared
    image = _image_of(weights.recipe, facts(weights) & facts(shared))
    pairs = [(getattr(weights, name), getattr(shared, name)) for name in MATRICES]
    if all(image.suits(a) and image.suits(b) and joined(a.packed, b.packed) for a, b in pairs):
        return weights, shared
    experts = [weights, shared]
    for name in MATRICES:
        matrices = [getattr(w, name) for w in experts]
        for i, part in enumerate(_pack(image, matrices, matrices[0].device)):
            experts[i] = _with(experts[i], name, part)
    return experts[0], experts[1]


def hold_on(
    device: torch.device, weights: ExpertWeights, shared: ExpertWeights | None
) -> tuple[ExpertWeights, ExpertWeights | None]:
    """The same on another device, packed on the way, an expert at a time."""
    both = [w for w in (weights, shared) if w is not None]
    groups = (
        [both] if shared is not None and not why_apart(weights, shared) else [[w] for w in both]
    )
    experts: list[ExpertWeights] = []
    for group in groups:
        if not is_image(group[0]):
            experts.append(group[0].to(device))
            continue
        known = [facts(w) for w in group]
        image = _image_of(group[0].recipe, known[0] & known[-1])
        parts = {
            name: _pack(image, [getattr(w, name) for w in group], device, is_watched=False)
            for name in MATRICES
        }
        for i, w in enumerate(group):
            rest = {
                n: None if (t := getattr(w, n)) is None else t.to(device)
                for n in ("b13", "b2", "x_global", "acts_global")
            }
            experts.append(replace(w, **{n: parts[n][i] for n in MATRICES}, **rest))  # type: ignore[arg-type]
    return experts[0], experts[1] if len(experts) > 1 else None


def is_image(weights: ExpertWeights) -> bool:
    """Whether Hopper reads these experts out of images."""
    return recipe_named(weights.recipe).weights.element.bits == 4


class Packing:
    """Experts that come one by one, packed as they come: no whole copy is ever made of them.

    Until one comes that it cannot hold, the image is the one that decodes fastest; then those that
    are there are packed anew, in the same memory.
    """

    def __init__(self, recipe: str, num: int, device: torch.device) -> None:
        self._recipe, self._num, self._device = recipe, num, device
        self._image = Image(decodes_to_e4m3(recipe), is_placed=True)
        self._facts, self._images = Facts(), {}  # type: tuple[Facts, dict[str, PackedMatrix]]

    def put(self, expert: int, **parts: Quantized) -> None:
        """The next expert: its matrices [1, ...], canonical."""
        for part in parts.values():
            self._facts &= pack.facts_of(part)
        to_e4m3 = self._image.to_e4m3 and self._facts.fits_e4m3
        image = Image(to_e4m3, not to_e4m3 and self._facts.can_be_placed)
        for name, part in parts.items():
            kind = kind_of(part, to_e4m3=image.to_e4m3, is_placed=image.is_placed)
            had = self._images.get(name)
            if had is None:
                self._images[name] = empty_matrix(kind, part, self._num, self._device)
            elif had.kind != kind:
                self._images[name] = had.as_kind(kind, expert)
            fill(self._images[name], part, expert)
        self._image = image

    def matrices(self) -> dict[str, Quantized]:
        """What was made; canonical where no image holds all of them."""
        if self._image.to_e4m3 or self._facts.fits_bf16:
            return dict(self._images)
        return {name: part.plain() for name, part in self._images.items()}


def put(weights: ExpertWeights, other: ExpertWeights) -> ExpertWeights:
    """Packed experts with the values of others, wherever those lie: in place if they can be."""
    image = _image_of(other.recipe, facts(other))
    if not all(image.suits(getattr(weights, name)) for name in MATRICES):
        return hold_on(weights.device, other, None)[0]
    for name in MATRICES:
        part = getattr(weights, name)
        fill(part, getattr(other, name))
        part.aside.forget_lent()
        object.__setattr__(part, "source", None)
    for name in ("b13", "b2", "x_global", "acts_global"):
        mine, source = getattr(weights, name), getattr(other, name)
        if mine is not None:
            with torch.no_grad(), torch.inference_mode(False):
                counted(mine).copy_(source)
    return weights


# -- which image ----------------------------------------------------------------------------------


def _check(recipe: str, known: Facts) -> None:
    """Refuse weights that no exact path holds."""
    require(
        not (reason := _why_not(recipe, known)),
        "the hopper backend needs E8M0 scales of 2**-126 or more where a group is not zero",
        got=reason,
        fix='use backend="portable", which holds them exactly',
        kind=NotAvailable,
    )


def why_apart(weights: ExpertWeights, shared: ExpertWeights) -> str:
    """Why no launch has both; "" where one can."""
    reason = why_unlike(weights, shared) or why_not(weights) or why_not(shared)
    if not reason and can_be_e4m3(weights) != can_be_e4m3(shared):
        reason = "exponents that E4M3 holds in one of routed and shared experts only"
    return reason


def lie_apart(weights: ExpertWeights, shared: ExpertWeights) -> str:
    """Why no launch has both as they lie now; a layer brings them together when it is built."""
    if not (weights.is_packed or shared.is_packed):
        return ""
    for name in MATRICES:
        a, b = getattr(weights, name), getattr(shared, name)
        if not (isinstance(a, PackedMatrix) and isinstance(b, PackedMatrix)):
            return LIE_APART
        if joined(a.packed, b.packed) is None:
            return LIE_APART
    return ""


def fits_e4m3(weights: ExpertWeights) -> bool:
    """Whether the layer multiplies in FP8, where its recipe does."""
    return not decodes_to_e4m3(weights.recipe) or can_be_e4m3(weights)


def traits(weights: ExpertWeights) -> tuple[bool, str]:
    """`fits_e4m3` and `why_not`, with one look."""
    known = facts(weights)
    fits = not decodes_to_e4m3(weights.recipe) or known.fits_e4m3
    return fits, _why_not(weights.recipe, known)


def why_not(weights: ExpertWeights) -> str:
    """Why no exact path holds these weights; "" where one does."""
    return _why_not(weights.recipe, facts(weights))


def _why_not(recipe: str, known: Facts) -> str:
    if known.fits_bf16 or decodes_to_e4m3(recipe, fits_e4m3=known.fits_e4m3):
        return ""
    return "a scale of 2**-127"


def can_be_e4m3(weights: ExpertWeights) -> bool:
    """Whether w4a8_block multiplies in FP8."""
    if not decodes_to_e4m3(weights.recipe):
        return False
    return decodes_to_e4m3(weights.recipe, fits_e4m3=facts(weights).fits_e4m3)


def facts(weights: ExpertWeights) -> Facts:
    """Which images hold these experts, as they are now."""
    renew(weights)
    if not is_image(weights):
        return NO_IMAGE
    parts = []
    for part in (weights.w13, weights.w2):
        is_packed = isinstance(part, PackedMatrix)
        parts.append(part.facts if is_packed else _facts(part))  # type: ignore[attr-defined]
    return parts[0] & parts[1]


def _image_of(recipe: str, known: Facts) -> Image:
    kind = image_of(recipe, fits_e4m3=known.fits_e4m3, can_be_placed=known.can_be_placed)
    return Image(kind == "e4m3_image", kind == "placed_image")


# By the bytes of a canonical matrix: what is known of it, and the seal under which (decision 0026).
_KNOWN: Any = WeakIdKeyDictionary()


def _facts(w: Quantized) -> Facts:
    """Found once for these bytes and scales as they are now."""
    if w.spec.element.bits != 4 or w.spec.scale is not Scale.E8M0:
        return pack.facts_of(w)
    parts = tuple(w.tensors().values())
    refs, seal, facts = _KNOWN.get(w.data, ((), None, None))
    is_new = seal is None or any(ref() is not t for ref, t in zip(refs, parts, strict=True))
    if is_new or not seal.holds(parts):
        facts = Facts(*map(all, zip(*packing.facts_each(w), strict=True)))
        _KNOWN[w.data] = tuple(map(weakref.ref, parts)), Seal(parts), facts
    known: Facts = facts
    return known


# -- packing --------------------------------------------------------------------------------------


def _packed(part: Quantized) -> Packed:
    return part.packed if isinstance(part, PackedMatrix) else pack.pack(part, to_e4m3=False)


def _alone(weights: ExpertWeights, image: Image) -> None:
    """Let experts hold images: in the memory of the canonical bytes, or beside them, where each
    matrix goes before the next is packed."""
    from megamoe.engine import in_place

    for name in MATRICES:
        if not image.suits(getattr(weights, name)):
            packed = None
            if not isinstance(getattr(weights, name), PackedMatrix):
                kind = _kind_of(image, getattr(weights, name))
                packed = in_place.packed(weights, name, kind)
            if packed is None:
                packed = _pack(image, [getattr(weights, name)], weights.device)[0]
            weights._replace_parts(**{name: packed})


def _kind_of(image: Image, part: Quantized) -> str:
    return kind_of(part, to_e4m3=image.to_e4m3, is_placed=image.is_placed)


def _pack(
    image: Image, parts: list[Quantized], device: torch.device, *, is_watched: bool = True
) -> list[PackedMatrix]:
    """Matrices as parts of one memory, written an expert at a time.

    is_watched  writes to what they are packed from are seen, while somebody holds it
    """
    kind = _kind_of(image, parts[0])
    out = empty_matrix(kind, parts[0], sum(map(len, parts)), device)
    first = 0
    for part in parts:
        fill(out, part, first)
        first += len(part)
    images = parts_of(out, [len(part) for part in parts])
    for new, part in zip(images, parts, strict=True):
        if isinstance(part, PackedMatrix):
            source = None if part.source is None else copy(part.source)
        else:
            source = Source(part) if is_watched and device.type != "meta" else None
        object.__setattr__(new, "source", source if is_watched else None)
    return images


def _with(weights: ExpertWeights, name: str, part: PackedMatrix) -> ExpertWeights:
    """Canonical experts hold the image themselves; of packed ones a twin does, since graphs may
    read what they hold."""
    if isinstance(getattr(weights, name), PackedMatrix):
        return replace(weights, **{name: part})  # type: ignore[arg-type]
    weights._replace_parts(**{name: part})
    return weights


# -- what was packed from memory that others hold -------------------------------------------------


def has_changed(*all_of_them: ExpertWeights | None) -> bool:
    """Whether somebody wrote to memory that images were packed from; refuses writes to copies."""
    is_changed = False
    for part in _images(*all_of_them):
        part.aside.refuse_written()
        if part.source is not None:
            is_changed |= part.source.has_changed()
            if part.source.is_gone:
                object.__setattr__(part, "source", None)
    return is_changed


def verify(*all_of_them: ExpertWeights | None) -> None:
    """Refuse experts that were written to, uncounted, after they were packed."""
    for part in _images(*all_of_them):
        if part.source is not None:
            part.source.verify()


def renew(weights: ExpertWeights) -> None:
    """Pack anew what others wrote to: in place, so that graphs stay valid, if the image can be."""
    if not has_changed(weights):
        return
    parts = {n: p for n in MATRICES if isinstance(p := getattr(weights, n), PackedMatrix)}
    plain = {name: part.renewed() for name, part in parts.items()}
    now = replace(weights, **plain)  # type: ignore[arg-type]
    if why_not(now):
        weights._replace_parts(**plain)
        return
    image = _image_of(now.recipe, facts(now))
    for name, part in parts.items():
        source = part.source
        if image.suits(part):
            fill(part, plain[name])
        else:
            packed = _pack(image, [plain[name]], weights.device, is_watched=False)[0]
            source = copy(source)  # who still has the old image must see that it is old
            object.__setattr__(packed, "source", source)
            weights._replace_parts(**{name: packed})
        if source is not None:
            source.accept()


def _images(*all_of_them: ExpertWeights | None) -> list[PackedMatrix]:
    return [
        part
        for weights in all_of_them
        if weights is not None
        for part in (weights.w13, weights.w2)
        if isinstance(part, PackedMatrix)
    ]
