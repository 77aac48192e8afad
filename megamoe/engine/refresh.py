"""New values for experts that are in use, in the same memory: graphs that hold it stay valid.

All is checked before anything is written, and experts are brought one by one, so that beside the
layer there is one expert. What would need another kernel is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.engine import checkpoint, packing
from megamoe.engine.fingerprint import counted
from megamoe.engine.packed import PackedMatrix
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError, one_of, require
from megamoe.formats.quantize import quantize_into, weight_global_scale
from megamoe.formats.quantized import Quantized, empty
from megamoe.formats.spec import Scale
from megamoe.kernels.hopper.weights.pack import Facts, facts_of

# By kind of image: which fact it rests on, and what to say of values without it.
NEEDS: dict[str, tuple[str, str]] = {
    "e4m3_image": ("fits_e4m3", "exponents of a row within 12 octaves, which E4M3 holds"),
    "placed_image": ("can_be_placed", "scales of at most 2, which the image can hold"),
    "mx_image": ("fits_bf16", "scales of 2**-126 or more"),
}
REBUILD = "these values need another kernel: build the layer anew"


@dataclass(frozen=True, slots=True)
class Refresh:
    """What is to be written, and to which experts.

    w13, w2   floats [n, 2I, H] and [n, H, I], or Quantized in the recipe's format; None: unchanged
    b13, b2   biases [n, 2I] and [n, H], or None
    gate_up   order of rows of w13 and b13 in floats
    experts   n local experts
    """

    w13: Tensor | Quantized | None
    w2: Tensor | Quantized | None
    b13: Tensor | None
    b2: Tensor | None
    gate_up: str
    experts: tuple[int, ...]

    @classmethod
    def of(
        cls,
        weights: ExpertWeights,
        w13: Tensor | Quantized | None,
        w2: Tensor | Quantized | None,
        experts: Sequence[int] | None,
        b13: Tensor | None,
        b2: Tensor | None,
        gate_up: str,
    ) -> Refresh:
        """As a caller gives it; nothing is read yet."""
        numbers = tuple(range(weights.num_experts) if experts is None else experts)
        one_of(gate_up, checkpoint.GATE_UP, "gate_up")
        require(
            all(isinstance(e, int) and 0 <= e < weights.num_experts for e in numbers)
            and len(set(numbers)) == len(numbers),
            f"experts must be different local ones, 0 to {weights.num_experts - 1}",
            got=list(numbers)[:16],
            kind=RangeError,
        )
        require(
            any(t is not None for t in (w13, w2, b13, b2)),
            "there must be something to write",
            got="no tensor",
            kind=ShapeError,
        )
        return cls(w13, w2, b13, b2, gate_up, numbers)

    def check(self, weights: ExpertWeights) -> None:
        """Refuse what cannot be written to these experts; reads every value, writes none."""
        by_matrix: dict[str, dict[int, Facts]] = {"w13": {}, "w2": {}}
        with torch.no_grad(), torch.inference_mode(False):
            for name, facts in by_matrix.items():
                given, held = getattr(self, name), getattr(weights, name)
                if given is None:
                    continue
                self._check_matrix(name, given, held)
                known = self._known(given, held)
                facts |= known
                for expert, one in self._each(given, held, name):
                    if expert in known:
                        continue
                    checkpoint.refuse_nan(one, name, first_expert=expert)
                    if isinstance(held, PackedMatrix):
                        facts[expert] = facts_of(one)
                        check_image(held.kind, facts[expert], f"{name} of expert {expert}")
            _check_arithmetic(weights, by_matrix)
            for name in ("b13", "b2"):
                self._check_bias(name, getattr(self, name), getattr(weights, name))

    def write(self, weights: ExpertWeights) -> None:
        """Write, expert by expert; `check` passed."""
        with torch.no_grad(), torch.inference_mode(False):
            for name in ("w13", "w2"):
                given, held = getattr(self, name), getattr(weights, name)
                if given is None:
                    continue
                if self._is_there(given, held):
                    known = self._known(given, held)
                    packing.write(held, self.experts, given, [known.get(e) for e in self.experts])
                    object.__setattr__(held, "source", None)
                    continue
                for expert, one in self._each(given, held, name):
                    _put(held, expert, one)
            for name in ("b13", "b2"):
                self._write_bias(name, getattr(self, name), getattr(weights, name))

    def _is_there(self, given: Tensor | Quantized, held: Quantized) -> bool:
        """Whether experts can be packed as they lie, all at once."""
        return (
            isinstance(given, Quantized) and not isinstance(given, PackedMatrix)
            and isinstance(held, PackedMatrix) and given.device == held.device
        )  # fmt: skip

    def _known(self, given: Tensor | Quantized, held: Quantized) -> dict[int, Facts]:
        """What scales say of experts that need no look at their values: any image holds them."""
        if not self._is_there(given, held):
            return {}
        assert isinstance(given, Quantized)
        each = zip(self.experts, packing.facts_by_scales(given), strict=True)
        return {expert: facts for expert, facts in each if facts is not None}

    def _write_bias(self, name: str, given: Tensor | None, held: Tensor | None) -> None:
        if given is None or held is None:
            return
        rows = given.to(held.device).float()
        if name == "b13":
            rows = rows.reshape(len(self.experts), -1, 1)
            rows = checkpoint.gate_then_up(rows, self.gate_up)[..., 0]
        out = counted(held)  # one made under inference mode may not be written to
        for i, expert in enumerate(self.experts):
            out[expert].copy_(rows[i])

    def _check_matrix(self, name: str, given: object, held: Quantized) -> None:
        num, rest = len(self.experts), held.shape[1:]
        if isinstance(given, Quantized):
            require(
                given.format == held.format,
                f"{name} must be floats, or Quantized in {held.format}",
                got=given.format,
                kind=DTypeError,
            )
            wanted: tuple[int, ...] = (num, *rest)
        else:
            checkpoint.check_source(given, name, 3)
            wanted = (num, 2 * rest[1], rest[2]) if name == "w13" else (num, *rest)
        assert isinstance(given, Tensor | Quantized)
        require(
            tuple(given.shape) == wanted,
            f"{name} must be {wanted} for {num} experts",
            got=tuple(given.shape),
            kind=ShapeError,
        )

        _check_global(name, given, held)

    def _check_bias(self, name: str, given: Tensor | None, held: Tensor | None) -> None:
        if given is None:
            return
        require(
            held is not None,
            f"{name} can only be written where the layer has it",
            got="a layer without",
            fix="build the layer anew",
            kind=NotAvailable,
        )
        assert held is not None
        wanted = (len(self.experts), held[0].numel())
        checkpoint.check_source(given, name, 2)
        require(
            tuple(given.shape) == wanted, f"{name} must be {wanted}", got=tuple(given.shape),
            kind=ShapeError,
        )  # fmt: skip
        require(
            bool(given.isfinite().all()), f"{name} must be finite", got="NaN or Inf",
            kind=RangeError,
        )  # fmt: skip

    def _each(
        self, given: Tensor | Quantized, held: Quantized, name: str
    ) -> Iterator[tuple[int, Quantized]]:
        """(expert, its canonical matrix [1, ...] where the layer lies), one at a time.

        The caller turns gradients off: a generator that did would leave them off where its loop
        raises.
        """
        for i, expert in enumerate(self.experts):
            if isinstance(given, Quantized):
                yield expert, given[i : i + 1].to(held.device)
                continue
            source = given[i].detach().to(held.device)
            if name == "w13":
                source = checkpoint.gate_then_up(source, self.gate_up)
            yield expert, _quantized(source[None], held)


def _check_global(name: str, given: object, held: Quantized) -> None:
    """NVFP4: one factor per expert, or as many as are held; none of them NaN or Inf."""
    if not held.spec.has_global:
        return
    g = given.global_scale if isinstance(given, Quantized) else None
    mine = held.global_scale
    assert mine is not None
    require(
        1 <= (1 if g is None else g.ndim) <= mine.ndim,
        f"{name} must have one global scale per expert, and the layer as many or more",
        got=f"{'one per expert' if g is None else tuple(g.shape)} for {tuple(mine.shape)}",
        fix="build the layer anew",
        kind=ShapeError,
    )
    require(
        g is None or bool(g.isfinite().all()), f"global scales of {name} must be finite",
        got="NaN or Inf", kind=RangeError,
    )  # fmt: skip


def check_image(kind: str, facts: Facts, what: str) -> None:
    """Refuse values that an image of this kind cannot hold."""
    fact, wanted = NEEDS.get(kind, ("", ""))
    require(
        not fact or bool(getattr(facts, fact)),
        f"{what} must have {wanted}",
        got="others",
        fix=REBUILD,
        kind=NotAvailable,
    )


def _check_arithmetic(weights: ExpertWeights, writes: dict[str, dict[int, Facts]]) -> None:
    """Refuse values that would let BF16's images be E4M3's: which it is depends on values alone, so
    the next call would pack others, and graphs would go on with these."""
    both = [(getattr(weights, name), facts) for name, facts in writes.items()]
    if weights.recipe != "w4a8_block" or not all(isinstance(w, PackedMatrix) for w, _ in both):
        return
    if any(w.kind == "e4m3_image" for w, _ in both):
        return
    require(
        not all(w.aside.facts_after(facts).fits_e4m3 for w, facts in both),
        "a layer that multiplies in BF16 must keep exponents that E4M3 does not hold",
        got="values that all fit",
        fix=REBUILD,
        kind=NotAvailable,
    )


def _quantized(source: Tensor, like: Quantized) -> Quantized:
    out = empty(tuple(source.shape), like.spec, source.device)
    if out.global_scale is not None:
        out.global_scale.copy_(weight_global_scale(source))
    quantize_into(source, out)
    return out


def _put(held: Quantized, expert: int, one: Quantized) -> None:
    if isinstance(held, PackedMatrix):
        packing.write(held, [expert], one)
        object.__setattr__(held, "source", None)  # what it was packed from is no longer it
        return
    for name, t in held.tensors().items():
        given = getattr(one, name)[0]
        if held.spec.scale is Scale.E4M3 and name == "global_scale" and t.ndim == 2:
            given = given.expand(t.shape[1:])
        t[expert].copy_(given)
