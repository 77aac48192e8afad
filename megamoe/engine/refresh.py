"""New values for experts that are in use, in the same memory: graphs that hold it stay valid.

All is checked before anything is written. Experts that lie elsewhere are brought one by one, so
that beside the layer there is one expert; kernels check and write those on the layer's GPU all
together (`refresh_on_gpu`). What would need another kernel is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from megamoe.engine import aliases, checkpoint, derived, device_guard, packing
from megamoe.engine.fingerprint import counted
from megamoe.engine.packed import PackedMatrix
from megamoe.engine.refresh_on_gpu import OnGpu
from megamoe.engine.status import is_capturing
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError, one_of, require
from megamoe.formats.quantize import quantize_into, weight_global_scale
from megamoe.formats.quantized import Quantized, empty
from megamoe.kernels.hopper.weights.pack import Facts, facts_of, fits_bf16
from megamoe.planner.numerics import decodes_to_e4m3

# By kind of image: which fact it rests on, and what to say of values without it.
NEEDS: dict[str, tuple[str, str]] = {
    "e4m3_image": ("fits_e4m3", "exponents of a row within 12 octaves, which E4M3 holds"),
    "placed_image": ("can_be_placed", "scales of at most 2, which the image can hold"),
    "mx_image": ("fits_bf16", "scales of 2**-126 or more"),
}
MATRICES, BIASES = ("w13", "w2"), ("b13", "b2")
REBUILD = "these values need another kernel: build the layer anew"


@dataclass(frozen=True, slots=True)
class Refresh:
    """What is to be written, and to which experts.

    w13, w2   floats [n, 2I, H] and [n, H, I], or Quantized in the recipe's format; None: unchanged
    b13, b2   biases [n, 2I] and [n, H], or None
    gate_up   order of rows of w13 and b13 in floats
    experts   n local experts
    facts     by matrix and expert, once they were checked
    looked    kernels looked, and found nothing that is refused
    """

    w13: Tensor | Quantized | None
    w2: Tensor | Quantized | None
    b13: Tensor | None
    b2: Tensor | None
    gate_up: str
    experts: Sequence[int]
    facts: dict[str, dict[int, Facts]] = field(default_factory=dict)
    looked: list[OnGpu] = field(default_factory=list)

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
        num = weights.num_experts
        numbers = range(num) if experts is None else tuple(experts)
        one_of(gate_up, checkpoint.GATE_UP, "gate_up")
        require(
            experts is None
            or (
                all(isinstance(e, int) and 0 <= e < num for e in numbers)
                and len(set(numbers)) == len(numbers)
            ),
            f"experts must be different local ones, 0 to {num - 1}",
            got=list(numbers[:16]),
            kind=RangeError,
        )
        require(
            any(t is not None for t in (w13, w2, b13, b2)),
            "there must be something to write",
            got="no tensor",
            kind=ShapeError,
        )
        return cls(w13, w2, b13, b2, gate_up, numbers)

    def apply(self, weights: ExpertWeights) -> None:
        """Check and write, on one rank: back to back where kernels do both."""
        with torch.no_grad(), torch.inference_mode(False):
            self._check_shapes(weights)
            gpu = None if _rests_on_facts(weights) else self._on_gpu(weights)
            if gpu is not None:
                with _launching(weights):
                    gpu.look()
                    gpu.write()
                    numbers = gpu.read()
                if not numbers.is_refused:
                    gpu.keep(numbers)
                    self._write_biases(weights)
                    self._renew_derived(weights)
                    return
            self._check_each(weights)  # says what is refused
        self.write(weights)

    def check(self, weights: ExpertWeights) -> None:
        """Refuse what cannot be written to these experts; reads every value, writes none."""
        with torch.no_grad(), torch.inference_mode(False):
            self._check_shapes(weights)
            gpu = self._on_gpu(weights)
            if gpu is not None:
                with _launching(weights):
                    gpu.look()
                    numbers = gpu.read()
                if not numbers.is_refused:
                    for name, facts in zip(MATRICES, numbers.facts, strict=True):
                        if getattr(self, name) is not None:
                            self.facts[name] = dict(zip(self.experts, facts, strict=True))
                    _check_arithmetic(weights, self.facts)
                    self.looked.append(gpu)
                    return
            self._check_each(weights)

    def write(self, weights: ExpertWeights) -> None:
        """Write all of it; `check` passed."""
        if not self.experts:
            return
        with torch.no_grad(), torch.inference_mode(False), device_guard.on(weights.device):
            if self.looked:
                gpu = self.looked.pop()
                with _launching(weights):
                    gpu.write()
                    gpu.keep(gpu.read())
            else:
                for name in MATRICES:
                    if getattr(self, name) is not None:
                        self._write_matrix(name, getattr(weights, name))
            self._write_biases(weights)
            self._renew_derived(weights)

    def _on_gpu(self, weights: ExpertWeights) -> OnGpu | None:
        """What kernels do all of it by; biases that they do not read were looked at."""
        gpu = OnGpu.of(
            self.experts, (self.w13, self.w2), (weights.w13, weights.w2), (self.b13, self.b2),
            is_interleaved=self.gate_up == "interleaved",
        )  # fmt: skip
        if gpu is not None:
            for name, by_kernel in zip(BIASES, gpu.biases, strict=True):
                if by_kernel is None:
                    _check_finite(name, getattr(self, name))
        return gpu

    def _check_shapes(self, weights: ExpertWeights) -> None:
        """All but values."""
        require(
            not is_capturing(weights.device), "a refresh must not be captured, as the host waits",
            got="a stream that is captured", kind=NotAvailable,
            fix="refresh between replays: graphs read the memory that it writes",
        )  # fmt: skip
        for name in MATRICES:
            if getattr(self, name) is not None:
                self._check_matrix(name, getattr(self, name), getattr(weights, name))
        for name in BIASES:
            self._check_bias(name, getattr(self, name), getattr(weights, name))
        values, held = ({n: getattr(t, n) for n in MATRICES + BIASES} for t in (self, weights))
        aliases.refuse(values, held, self.experts)
        held |= {"x_global": weights.x_global, "acts_global": weights.acts_global}
        aliases.refuse_shared([name for name, t in values.items() if t is not None], held)

    def _renew_derived(self, weights: ExpertWeights) -> None:
        """Scales that a backend placed: graphs read them where they lie."""
        for name in MATRICES:
            held = getattr(weights, name)
            if getattr(self, name) is not None and not isinstance(held, PackedMatrix):
                derived.renew(held)

    def _check_each(self, weights: ExpertWeights) -> None:
        """Look at values expert by expert, and name what is refused."""
        by_matrix: dict[str, dict[int, Facts]] = {"w13": {}, "w2": {}}
        for name, facts in by_matrix.items():
            if getattr(self, name) is not None:
                facts |= self._facts_of(name, getattr(weights, name))
        _check_arithmetic(weights, by_matrix)
        for name in BIASES:
            _check_finite(name, getattr(self, name))
        self.facts.update(by_matrix)

    def _facts_of(self, name: str, held: Quantized) -> dict[int, Facts]:
        """Of each expert of a matrix, of whose values nothing is to be refused."""
        source = getattr(self, name)
        _check_global(name, source, held)
        known = self._known(source, held)
        for expert, one in self._each(source, held, name):
            if expert not in known:
                checkpoint.refuse_nan(one, name, first_expert=expert)
                if isinstance(held, PackedMatrix):
                    known[expert] = facts_of(one)
            if isinstance(held, PackedMatrix):
                check_image(held.kind, known[expert], f"{name} of expert {expert}")
        return known

    def _write_matrix(self, name: str, held: Quantized) -> None:
        source, facts = getattr(self, name), self.facts.get(name, {})
        if isinstance(held, PackedMatrix) and self._is_there(source, held):
            packing.write(held, self.experts, source, [facts[expert] for expert in self.experts])
        elif not isinstance(held, PackedMatrix) and _is_plain(source, held):
            _copy(held, self.experts, source)
        else:
            for expert, one in self._each(source, held, name):
                _put(held, expert, one)
        if isinstance(held, PackedMatrix):
            object.__setattr__(held, "source", None)  # what it was packed from is no longer it

    def _is_there(self, values: Tensor | Quantized, held: Quantized) -> bool:
        """Whether experts can be packed as they lie, all at once."""
        return isinstance(held, PackedMatrix) and _is_plain(values, held)

    def _known(self, values: Tensor | Quantized, held: Quantized) -> dict[int, Facts]:
        """What scales say of experts that need no look at their values: any image holds them."""
        if not self._is_there(values, held):
            return {}
        assert isinstance(values, Quantized)
        each = zip(self.experts, packing.facts_by_scales(values), strict=True)
        return {expert: facts for expert, facts in each if facts is not None}

    def _write_biases(self, weights: ExpertWeights) -> None:
        for name in BIASES:
            self._write_bias(name, getattr(self, name), getattr(weights, name))

    def _write_bias(self, name: str, values: Tensor | None, held: Tensor | None) -> None:
        if values is None or held is None:
            return
        rows = values.to(held.device).float()
        if name == "b13":
            rows = rows.reshape(len(self.experts), -1, 1)
            rows = checkpoint.gate_then_up(rows, self.gate_up)[..., 0]
        out = counted(held)  # one made under inference mode may not be written to
        for given_run, run in _runs(self.experts):
            out[run].copy_(rows[given_run])

    def _check_matrix(self, name: str, source: object, held: Quantized) -> None:
        num, rest = len(self.experts), held.shape[1:]
        if isinstance(source, Quantized):
            require(
                source.format == held.format,
                f"{name} must be floats, or Quantized in {held.format}",
                got=source.format,
                kind=DTypeError,
            )
            wanted: tuple[int, ...] = (num, *rest)
        else:
            checkpoint.check_source(source, name, 3)
            wanted = (num, 2 * rest[1], rest[2]) if name == "w13" else (num, *rest)
        assert isinstance(source, Tensor | Quantized)
        require(
            tuple(source.shape) == wanted,
            f"{name} must be {wanted} for {num} experts",
            got=tuple(source.shape),
            kind=ShapeError,
        )
        _check_factors(name, source, held)
        _check_decoded(name, source, held)

    def _check_bias(self, name: str, values: Tensor | None, held: Tensor | None) -> None:
        if values is None:
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
        checkpoint.check_source(values, name, 2)
        require(
            tuple(values.shape) == wanted, f"{name} must be {wanted}", got=tuple(values.shape),
            kind=ShapeError,
        )  # fmt: skip

    def _each(
        self, values: Tensor | Quantized, held: Quantized, name: str
    ) -> Iterator[tuple[int, Quantized]]:
        """(expert, its canonical matrix [1, ...] where the layer lies), one at a time.

        The caller turns gradients off: a generator that did would leave them off where its loop
        raises.
        """
        for i, expert in enumerate(self.experts):
            if isinstance(values, Quantized):
                yield expert, values[i : i + 1].to(held.device)
                continue
            source = self._in_order(values[i].detach().to(held.device), name)
            yield expert, _quantized(source[None], held)

    def _in_order(self, source: Tensor, name: str) -> Tensor:
        """One expert's floats in our order of rows."""
        return checkpoint.gate_then_up(source, self.gate_up) if name == "w13" else source


@contextmanager
def _launching(weights: ExpertWeights) -> Iterator[None]:
    """Launches go to the experts' device, and are made: also where a call is compiled alone."""
    from megamoe.engine.compile_only import launched

    with device_guard.on(weights.device), launched():
        yield


def _is_plain(values: Tensor | Quantized, held: Quantized) -> bool:
    """Whether experts are canonical ones on the layer's device."""
    return (
        isinstance(values, Quantized) and not isinstance(values, PackedMatrix)
        and values.device == held.device
    )  # fmt: skip


def _check_finite(name: str, bias: Tensor | None) -> None:
    require(
        bias is None or bool(bias.isfinite().all()), f"{name} must be finite", got="NaN or Inf",
        kind=RangeError,
    )  # fmt: skip


def _check_factors(name: str, values: object, held: Quantized) -> None:
    """NVFP4: one factor per expert, or as many as are held."""
    if not held.spec.has_global:
        return
    g = values.global_scale if isinstance(values, Quantized) else None
    if isinstance(held, PackedMatrix):
        ndim = held.global_ndim
    else:
        ndim = 0 if held.global_scale is None else held.global_scale.ndim
    require(
        1 <= (1 if g is None else g.ndim) <= ndim,
        f"{name} must have one global scale per expert, and the layer as many or more",
        got=f"{'one per expert' if g is None else tuple(g.shape)} for {held.shape[:ndim]}",
        fix="build the layer anew",
        kind=ShapeError,
    )


def _check_decoded(name: str, values: Tensor | Quantized, held: Quantized) -> None:
    """Refuse scales that kernels which decode to BF16 would lose, where such have read experts."""
    if isinstance(held, PackedMatrix) or not derived.is_true(held, "fits_bf16"):
        return
    if isinstance(values, Quantized) and values.scale is not None:
        is_small = bool((values.scale.view(torch.uint8) == 0).any())  # nearly never
        require(
            not is_small or fits_bf16(values), f"{name} must have {NEEDS['mx_image'][1]}",
            got="others", fix=REBUILD, kind=NotAvailable,
        )  # fmt: skip


def _check_global(name: str, values: object, held: Quantized) -> None:
    """NVFP4: no factor is NaN or Inf."""
    g = values.global_scale if held.spec.has_global and isinstance(values, Quantized) else None
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


def _rests_on_facts(weights: ExpertWeights) -> bool:
    """Whether what may be written depends on what all experts are then."""
    both = weights.w13, weights.w2
    return decodes_to_e4m3(weights.recipe) and all(
        isinstance(w, PackedMatrix) and w.kind != "e4m3_image" for w in both
    )


def _check_arithmetic(weights: ExpertWeights, writes: dict[str, dict[int, Facts]]) -> None:
    """Refuse values that would let BF16's images be E4M3's: which it is depends on values alone, so
    the next call would pack others, and graphs would go on with these."""
    if not _rests_on_facts(weights):
        return
    both = [(getattr(weights, name), writes.get(name, {})) for name in MATRICES]
    require(
        not all(w.aside.facts_after(facts).fits_e4m3 for w, facts in both),
        "a layer that multiplies in BF16 must keep exponents that E4M3 does not hold",
        got="values that all fit",
        fix=REBUILD,
        kind=NotAvailable,
    )


def _quantized(source: Tensor, like: Quantized) -> Quantized:
    if packing.is_gpu(like.device):
        from megamoe.kernels.portable import quantise_weights

        if quantise_weights.can(like.spec):
            return quantise_weights.quantised(source, like.spec)
    out = empty(tuple(source.shape), like.spec, source.device)
    if out.global_scale is not None:
        out.global_scale.copy_(weight_global_scale(source))
    quantize_into(source, out)
    return out


def _put(held: Quantized, expert: int, one: Quantized) -> None:
    if isinstance(held, PackedMatrix):
        packing.write(held, [expert], one)
    else:
        _copy(held, [expert], one)


def _copy(held: Quantized, experts: Sequence[int], values: Quantized) -> None:
    """Canonical experts [n, ...]: one copy of every tensor for experts that follow each other."""
    for name, t in held.tensors().items():
        source = getattr(values, name)
        while source.ndim < t.ndim:  # NVFP4: a factor for gate and up
            source = source[..., None]
        for given_run, run in _runs(experts):
            t[run].copy_(source[given_run])


def _runs(experts: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Experts that follow each other: where they stand among those that are given, and which."""
    ends = [i for i in range(1, len(experts)) if experts[i] != experts[i - 1] + 1]
    for first, end in pairwise((0, *ends, len(experts))):
        yield slice(first, end), slice(experts[first], experts[first] + end - first)
