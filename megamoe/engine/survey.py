"""What kernels say of tensors of a GPU: any number of launches, and one wait of the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megamoe.engine import device_guard
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Scale


class Survey:
    """Tensors that are to be looked at, each with flags of its own; 0: nothing was found."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._num = device, 0
        self._launches: list[Callable[[Tensor], None]] = []

    def experts(
        self, num: int, given: Quantized | Callable[[int], Quantized], *, wants_facts: bool
    ) -> range | None:
        """A flag for each of `num` experts: NaN and Inf, and which images cannot hold it.

        given        them, or what makes one of them, which are then looked at one by one
        wants_facts  of MXFP4, which images; else NaN alone
        None where a kernel cannot read them.
        """
        flags = range(self._num, self._num + num)
        if isinstance(given, Quantized):
            if not _can_look(given):
                return None
            self._launches.append(partial(look, given, first=flags.start, wants_facts=wants_facts))
        else:
            self._launches += [
                partial(_make_and_look, given, i, first=flags.start + i, wants_facts=wants_facts)
                for i in range(num)
            ]
        self._num += num
        return flags

    def finite(self, t: Tensor) -> range | None:
        """One flag for all of a tensor; None where a kernel cannot read it."""
        from megamoe.kernels.common import finite

        if t.dtype not in finite.NOT_FINITE or not finite.is_readable(t, 1):
            return None
        first, rule = self._num, finite.NOT_FINITE[t.dtype]
        self._launches.append(lambda flags: finite.launch(t, 1, rule, flags, first))
        self._num += 1
        return range(first, first + 1)

    def found(self) -> list[int]:
        """Launch all of it, and wait."""
        from megamoe.engine.compile_only import launched

        with device_guard.on(self._device), launched():
            flags = torch.zeros(self._num, dtype=torch.int32, device=self._device)
            for launch in self._launches:
                launch(flags)
            numbers: list[int] = flags.tolist()
        return numbers


def _can_look(w: Quantized) -> bool:
    from megamoe.kernels.common import finite

    tensors = w.tensors()
    g = tensors.pop("global_scale", None)
    is_whole = g is None or (g.ndim > 0 and finite.is_readable(g, len(w)))
    return is_whole and all(finite.is_readable(t, len(w)) for t in tensors.values())


def look(w: Quantized, flags: Tensor, *, first: int, wants_facts: bool) -> None:
    """Launch what looks at experts [n, ...]: at values where not every bit pattern is one, scales,
    global scales."""
    from megamoe.kernels.common import finite

    spec, num = w.spec, len(w)
    if w.scale is None:
        finite.launch(w.data, num, finite.NOT_FINITE[w.data.dtype], flags, first)
        return
    if spec.element.name == "e4m3":
        finite.launch(w.data, num, finite.NAN_E4M3, flags, first)
    if spec.scale is Scale.E8M0 and spec.element.bits == 4 and wants_facts:
        from megamoe.kernels.hopper.weights import facts_on_gpu

        facts_on_gpu.launch(w, flags, first)
        return
    rules = {
        Scale.E8M0: finite.NAN_E8M0, Scale.E4M3: finite.NAN_E4M3, Scale.FP32: finite.NAN_FP32
    }  # fmt: skip
    finite.launch(w.scale, num, rules[spec.scale], flags, first)
    if w.global_scale is not None:
        finite.launch(w.global_scale, num, finite.NOT_FINITE[torch.float32], flags, first)


def _make_and_look(
    make: Callable[[int], Quantized], i: int, flags: Tensor, *, first: int, wants_facts: bool
) -> None:
    look(make(i), flags, first=first, wants_facts=wants_facts)
