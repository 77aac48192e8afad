"""Many experts packed at once: on a GPU by a kernel, and with few looks from the host.

Which images hold an expert, and whether it is finite, mostly shows in its scales alone; only where
it does not are the values looked at, expert by expert.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megamoe.engine import device_guard
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Format, Scale, format_named
from megamoe.kernels.hopper.weights import pack
from megamoe.kernels.hopper.weights.pack import Facts, Spare

if TYPE_CHECKING:
    from megamoe.engine.packed import PackedMatrix

MX, NV = Facts(), Facts(True, True, False)  # what is true of all NVFP4
NO_SPARE = Spare()  # no group of zeros has another scale than 1
E4M3_NAN = 0x7F


def facts_each(w: Quantized) -> list[Facts]:
    """Of each canonical expert, with one wait where a kernel can look."""
    if w.spec.element.bits == 4 and w.spec.scale is not Scale.E8M0:
        return [NV] * len(w)
    if is_gpu(w.device) and w.spec.element.bits == 4 and len(w):
        from megamoe.engine.compile_only import launched
        from megamoe.kernels.common.finite import new_flags
        from megamoe.kernels.hopper.weights import facts_on_gpu

        with device_guard.on(w.device), launched():
            flags = new_flags(len(w), w.device)
            pair, num = facts_on_gpu.pair_of(facts_on_gpu.by_gate(w), flags)
            facts_on_gpu.launch(pair, num, flags, 0)
            return _facts_by_flags(flags.tolist(), w)
    return [pack.facts_of(w[i : i + 1]) for i in range(len(w))]


def facts_by_flags(flags: Sequence[int], fmt: Format) -> list[Facts]:
    """Of experts that are finite, by what `facts_on_gpu` found."""
    if fmt.element.bits != 4 or fmt.scale is not Scale.E8M0:
        return [NV] * len(flags)
    if not any(flags):
        return [MX] * len(flags)
    from megamoe.kernels.hopper.weights.facts_on_gpu import facts_of_flag

    return [facts_of_flag(flag) if flag else MX for flag in flags]


def _facts_by_flags(flags: Sequence[int], w: Quantized) -> list[Facts]:
    """The same of one matrix's experts, by all flags; of those with NaN as `facts_of` has it."""
    from megamoe.kernels.common.finite import BAD

    first = 1 if len(w.shape) == 4 else 1 + len(w)
    mine = flags[first : first + len(w)]
    known = facts_by_flags(mine, w.spec)
    return [
        pack.facts_of(w[i : i + 1]) if flag & BAD else fact
        for i, (flag, fact) in enumerate(zip(mine, known, strict=True))
    ]


def facts_by_scales(w: Quantized) -> list[Facts | None]:
    """Of each expert, if its scales say that it is finite and any image of its format holds it."""
    if w.device.type == "meta" or w.spec.element.bits != 4:
        return [None] * len(w)
    assert w.scale is not None
    codes = w.scale.view(torch.uint8).flatten(1, -2)
    if w.spec.scale is Scale.E4M3:
        fine = ((codes & E4M3_NAN) != E4M3_NAN).flatten(1).all(1)
        return [NV if ok else None for ok in fine.tolist()]
    high, low = codes.amax(-1).int(), codes.amin(-1).int()
    spread = high - low <= pack.MAX_RELATIVE - pack.MIN_RELATIVE
    fine = (spread & (low > 0) & (high <= pack.MAX_PLACED)).all(1)
    return [MX if ok else None for ok in fine.tolist()]


def write(
    out: PackedMatrix,
    experts: Sequence[int],
    w: Quantized,
    facts: Sequence[Facts] | None = None,
) -> None:
    """Experts `w` [n, ...], which lie where the image lies, at places of it.

    facts  of each, if they are known
    """
    if not is_packed_by_kernel(out):
        for i, expert in enumerate(experts):
            out.write(expert, w[i : i + 1])
        return
    if len(w) == 0:
        return
    from megamoe.engine.compile_only import launched
    from megamoe.kernels.hopper.weights import pack_on_gpu

    with device_guard.on(out.device), launched():  # also where a call is compiled alone
        flags = pack_on_gpu.launch(out.packed, experts, w, wants_facts=facts is None)
        if out.kind == "nv_image":
            numbers, known = [0] * len(flags), [NV] * len(w)
        else:
            numbers = flags.tolist()
            known = _facts_by_flags(numbers, w) if facts is None else list(facts)
        first = 3 + (2 if out.packed.is_gated else 3) * len(w)
        spares = [
            pack.spare_of(w[i : i + 1]) if num else NO_SPARE
            for i, num in enumerate(numbers[first : first + len(w)])
        ]
        out.aside.put_all(experts, spares, known)


def is_packed_by_kernel(out: PackedMatrix) -> bool:
    """Whether a kernel writes such an image where it lies."""
    return is_gpu(out.device) and agrees(out.kind, out.packed.is_gated, out.device)


def is_gpu(device: torch.device) -> bool:
    """Whether a kernel can write there."""
    return device.type == "cuda"


@functools.cache
def agrees(kind: str, is_gated: bool, device: torch.device) -> bool:
    """Whether the kernel writes the bytes of `pack.write` here: looked at once, on one expert."""
    from megamoe.engine.compile_only import launched
    from megamoe.kernels.hopper.weights import pack_on_gpu

    name = "nvfp4" if kind == "nv_image" else "mxfp4"
    fmt, rng = format_named(name), torch.Generator("cpu").manual_seed(0)
    how: dict[str, Any] = {"generator": rng, "dtype": torch.uint8, "device": "cpu"}
    cols = 384  # as wide a step as that of layers: the same compilation
    shape = (1, 2, 96, cols) if is_gated else (1, 160, cols)
    codes = torch.randint(256, (*shape[:-1], cols // 2), **how)
    codes[..., 16:32] &= 0x88  # groups of zeros, some of them -0
    scale = torch.randint(116, 124, (*shape[:-1], cols // fmt.block[1]), **how)
    g = torch.ones(1, dtype=torch.float32, device="cpu") if fmt.has_global else None
    held = scale.view(torch.float8_e4m3fn) if fmt.scale is Scale.E4M3 else scale
    w = Quantized(codes, held, name, shape, g).to(device)
    both = [pack.empty_image(kind, shape, device) for _ in range(2)]
    with device_guard.on(device), launched():
        pack.write(both[0], 0, w)
        pack_on_gpu.launch(both[1], [0], w)
    pairs = [(getattr(both[0], n), getattr(both[1], n)) for n in ("data", "scale", "factor")]
    is_same = all(a is None or torch.equal(a, b) for a, b in pairs)
    if not is_same:
        log = logging.getLogger("megamoe")
        log.warning("the kernel that packs %s is wrong on %s: packed by torch", kind, device)
    return is_same
