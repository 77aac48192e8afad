"""A refresh by kernels, of experts that lie on the layer's GPU: what looks at them, what writes
them, and one wait of the host for both.

What writes reads a flag that what looks has set, so the host queues both before it knows: where
anything is to be refused, nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megamoe.engine import packing
from megamoe.engine.packed import PackedMatrix
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Scale
from megamoe.kernels.hopper.weights import pack
from megamoe.kernels.hopper.weights.pack import Facts

if TYPE_CHECKING:
    from megamoe.kernels.common.finite import Look
    from megamoe.kernels.hopper.weights.facts_on_gpu import Matrix

Source = Quantized | Tensor | None


@dataclass(slots=True, eq=False)
class OnGpu:
    """Experts of one or two matrices, all of one kind, given all quantised or all as floats.

    experts         where they go
    sources         of w13 and w2: the experts, floats [n, 2I, H] and [n, H, I], or None
    held            what they go into
    biases          new ones that kernels look at, or None
    is_interleaved  rows of gate and up in floats alternate
    """

    experts: Sequence[int]
    sources: tuple[Source, Source]
    held: tuple[Quantized, Quantized]
    biases: tuple[Tensor | None, Tensor | None]
    is_interleaved: bool
    flags: Tensor
    largest: Sequence[Tensor | None] = (None, None)
    pair: tuple[Matrix, Matrix] | None = None  # as kernels that pack see them
    is_written: bool = False

    @classmethod
    def of(
        cls, experts: Sequence[int], sources: tuple[Source, Source],
        held: tuple[Quantized, Quantized], biases: tuple[Tensor | None, Tensor | None],
        *, is_interleaved: bool,
    ) -> OnGpu | None:  # fmt: skip
        """None where kernels cannot do all of it."""
        from megamoe.kernels.common import finite

        device = held[0].device
        both = [(g, h) for g, h in zip(sources, held, strict=True) if g is not None]
        if not packing.is_gpu(device) or not experts or not both:
            return None
        if len({_sort_of(g, h) for g, h in both}) > 1:
            return None
        if not all(_can(g, h, len(experts), is_interleaved=is_interleaved) for g, h in both):
            return None
        checked = [b if b is not None and _is_checked(b, device) else None for b in biases]
        first, second = (_as_held(g, h) for g, h in zip(sources, held, strict=True))
        flags = finite.new_flags(len(experts), device)
        return cls(experts, (first, second), held, (checked[0], checked[1]), is_interleaved, flags)

    @property
    def _one(self) -> tuple[Quantized | Tensor, Quantized]:
        """A matrix that is given, and what it goes into: both are alike."""
        return next((g, h) for g, h in zip(self.sources, self.held, strict=True) if g is not None)

    @property
    def _is_mx_image(self) -> bool:
        held = self._one[1]
        return isinstance(held, PackedMatrix) and held.kind != "nv_image"

    def look(self) -> None:
        """Launch what looks at all of it."""
        from megamoe.kernels.common import finite
        from megamoe.kernels.hopper.weights import facts_on_gpu, pack_on_gpu
        from megamoe.kernels.portable import quantise_weights

        (one, held), num = self._one, len(self.experts)
        checks = [
            finite.Look(b, finite.NOT_FINITE[b.dtype], 2 + i)
            for i, b in enumerate(self.biases) if b is not None
        ]  # fmt: skip
        if isinstance(held, PackedMatrix):
            self.pair, _ = facts_on_gpu.pair_of(self.sources, self.flags)
        if self._is_mx_image and self.pair is not None:
            has_powers = held.kind == "e4m3_image"  # type: ignore[attr-defined]
            if has_powers:
                self.pair = facts_on_gpu.with_powers(self.pair, num, self.flags.device)
            facts_on_gpu.launch(
                self.pair, num, self.flags, facts_on_gpu.FORBIDDEN[held.kind],  # type: ignore[attr-defined]
                has_powers=has_powers, is_interleaved=self.is_interleaved,
            )  # fmt: skip
        elif isinstance(one, Tensor):
            floats = tuple(g if isinstance(g, Tensor) else None for g in self.sources)
            self.largest = quantise_weights.look(floats, self.flags, held.spec)
        else:
            for i, g in enumerate(self.sources):
                checks += _checks_of(g, i) if isinstance(g, Quantized) else []
            self.largest = pack_on_gpu.factors_of(self.sources)
        if checks:
            finite.launch(checks, num, self.flags)

    def write(self) -> None:
        """Launch what writes experts, if nothing was found that is refused."""
        from megamoe.kernels.common import copies
        from megamoe.kernels.hopper.weights import pack_on_gpu
        from megamoe.kernels.portable import quantise_weights

        self.is_written = True
        both = [
            (g, h, largest)
            for g, h, largest in zip(self.sources, self.held, self.largest, strict=True)
            if g is not None
        ]
        if isinstance(both[0][1], PackedMatrix):
            images = [
                h.packed if g is not None and isinstance(h, PackedMatrix) else None
                for g, h in zip(self.sources, self.held, strict=True)
            ]
            assert self.pair is not None, "`look` comes first"
            pack_on_gpu.launch_both(
                images, self.experts, self.pair, self.flags, self.largest,
                is_interleaved=self.is_interleaved,
            )  # fmt: skip
        elif isinstance(both[0][0], Quantized):
            pairs = [(_as(getattr(g, n), t), t) for g, h, _ in both for n, t in h.tensors().items()]
            copies.launch(pairs, self.experts, self.flags)
        else:
            for g, h, largest in both:
                quantise_weights.write(
                    h, self.experts, g, self.flags, largest, is_interleaved=self.is_interleaved  # type: ignore[arg-type]
                )  # fmt: skip

    def read(self) -> Looked:
        """Wait for what was launched."""
        numbers: list[int] = []
        try:
            numbers = self.flags.tolist()
        finally:
            if self.is_written and not any(numbers[:1]):
                self._count()
        num, spec = len(self.experts), self._one[1].spec
        facts = [packing.facts_by_flags(numbers[1 + i * num :][:num], spec) for i in range(2)]
        counts = [numbers[3 + (2 + i) * num :][:num] for i in range(2)]
        return Looked(bool(numbers[0]), facts, counts)

    def _count(self) -> None:
        """Canonical experts were written to: torch knows nothing of it, and what was made of them
        must be made anew (decision 0026)."""
        for g, h in zip(self.sources, self.held, strict=True):
            if g is not None and not isinstance(h, PackedMatrix):
                counted = [t for t in h.tensors().values() if not t.is_inference()]
                torch.autograd.graph.increment_version(counted)

    def keep(self, looked: Looked) -> None:
        """What was written: say what images lose, and what is known of each expert."""
        for g, h, facts, counts in zip(
            self.sources, self.held, looked.facts, looked.counts, strict=True
        ):
            if g is None or not isinstance(h, PackedMatrix):
                continue
            spares = [
                pack.spare_of(self._quantised(g, h, i)) if num else packing.NO_SPARE
                for i, num in enumerate(counts)
            ]
            h.aside.put_all(self.experts, spares, facts)
            object.__setattr__(h, "source", None)  # what it was packed from is no longer it

    def _quantised(self, source: Quantized | Tensor, held: Quantized, i: int) -> Quantized:
        """One expert as it was packed."""
        from megamoe.engine import checkpoint
        from megamoe.kernels.portable import quantise_weights

        if isinstance(source, Quantized):
            return source[i : i + 1]
        rows = source[i]
        if len(held.shape) == 4:
            rows = checkpoint.gate_then_up(rows, "interleaved" if self.is_interleaved else "split")
        return quantise_weights.quantised(rows[None], held.spec)


@dataclass(frozen=True, slots=True)
class Looked:
    """What kernels say.

    is_refused  something is, and nothing was written
    facts       of each expert of w13 and of w2
    counts      of each: groups of zeros of which an image loses the scale
    """

    is_refused: bool
    facts: Sequence[Sequence[Facts]]
    counts: Sequence[Sequence[int]]


def _sort_of(source: Quantized | Tensor, held: Quantized) -> tuple[object, ...]:
    """What matrices that one launch writes have in common."""
    kind = held.kind if isinstance(held, PackedMatrix) else held.format
    return kind, held.spec, source.dtype if isinstance(source, Tensor) else ""


def _can(
    source: Quantized | Tensor, held: Quantized, num: int, *, is_interleaved: bool
) -> bool:  # fmt: skip
    """Whether kernels read these experts, and write them there."""
    from megamoe.kernels.common import finite
    from megamoe.kernels.portable import quantise_weights

    if isinstance(source, PackedMatrix) or source.device != held.device:
        return False
    if isinstance(held, PackedMatrix):
        if not packing.is_packed_by_kernel(held):
            return False
    elif not all(finite.is_readable(t, len(held)) for t in held.tensors().values()):
        return False
    if isinstance(source, Quantized):
        tensors = source.tensors()
        g = tensors.get("global_scale")
        return (g is None or g.ndim > 0) and all(
            finite.is_readable(t, num) for t in tensors.values()
        )
    if held.spec.scale is Scale.NONE:  # a copy
        is_split = len(held.shape) == 3 or not is_interleaved
        return source.dtype == torch.bfloat16 and is_split and finite.is_readable(source, num)
    is_small = source[0].numel() < quantise_weights.MAX_VALUES
    return quantise_weights.can(held.spec) and source.is_contiguous() and is_small


def _is_checked(bias: Tensor, device: torch.device) -> bool:
    from megamoe.kernels.common import finite

    return bias.device == device and bias.dtype in finite.NOT_FINITE and finite.is_readable(bias, 1)


def _as_held(source: Source, held: Quantized) -> Source:
    """BF16 that is held as it is: the experts of it."""
    if not isinstance(source, Tensor):
        return source
    source = source.detach()
    if held.spec.scale is not Scale.NONE:
        return source
    shape = (len(source), *held.shape[1:])
    return Quantized(source.view(shape), None, held.format, shape)


def _as(source: Tensor, held: Tensor) -> Tensor:
    """Experts of a tensor, as wide as what they go into: NVFP4 may have one factor for both."""
    if source.ndim == held.ndim:
        return source
    return source[..., None].expand(len(source), *held.shape[1:]).contiguous()


def _checks_of(w: Quantized, owner: int) -> list[Look]:
    """Which of an expert's tensors may hold NaN or Inf, and how they show it."""
    from megamoe.kernels.common import finite

    nan = {Scale.E8M0: finite.NAN_E8M0, Scale.E4M3: finite.NAN_E4M3, Scale.FP32: finite.NAN_FP32}
    if w.scale is None:
        return [finite.Look(w.data, finite.NOT_FINITE[w.data.dtype], owner)]
    checks = [finite.Look(w.scale, nan[w.spec.scale], owner)]
    if w.spec.element.name == "e4m3":
        checks.append(finite.Look(w.data, finite.NAN_E4M3, owner))
    if w.global_scale is not None:
        checks.append(finite.Look(w.global_scale, finite.NOT_FINITE[torch.float32], owner))
    return checks
