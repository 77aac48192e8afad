"""Many experts packed at once: on a GPU by a kernel, and with few looks from the host.

Which images hold an expert, and whether it is finite, mostly shows in its scales alone; only where
it does not are the values looked at, expert by expert.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megamoe.engine import device_guard
from megamoe.engine.survey import Survey
from megamoe.formats.quantized import Quantized
from megamoe.formats.spec import Format, Scale, format_named
from megamoe.kernels.hopper.weights import pack
from megamoe.kernels.hopper.weights.pack import Facts, Spare

if TYPE_CHECKING:
    from megamoe.engine.packed import PackedMatrix

MX, NV = Facts(), Facts(True, True, False)  # what is true of all NVFP4
LOST = ("e4m3_image", "placed_image")  # kinds that lose the scales of groups of zeros
E4M3_NAN = 0x7F
BAD = 1  # in a flag of `Survey`: NaN or Inf


def facts_each(w: Quantized) -> list[Facts]:
    """Of each canonical expert, with one wait where a kernel can look."""
    if w.spec.element.bits == 4 and w.spec.scale is not Scale.E8M0:
        return [NV] * len(w)
    if is_gpu(w.device) and w.spec.element.bits == 4:
        survey = Survey(w.device)
        if survey.experts(len(w), w, wants_facts=True) is not None:
            return facts_by_flags(survey.found(), w.spec)
    return [pack.facts_of(w[i : i + 1]) for i in range(len(w))]


def facts_by_flags(flags: Sequence[int], fmt: Format) -> list[Facts]:
    """Of experts that are finite, by what a `Survey` found."""
    if fmt.element.bits != 4 or fmt.scale is not Scale.E8M0:
        return [NV] * len(flags)
    from megamoe.kernels.hopper.weights.facts_on_gpu import facts_of_flag

    return [facts_of_flag(flag) if flag else MX for flag in flags]


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


class Job(NamedTuple):
    """Experts that a kernel packs now; `finish` waits for it.

    one  an expert, canonical [1, ...], by its number among those that are written
    """

    out: PackedMatrix
    experts: Sequence[int]
    one: Callable[[int], Quantized]
    facts: Sequence[Facts | None]
    counts: Tensor  # int32: groups of zeros of each


def write(
    out: PackedMatrix,
    experts: Sequence[int],
    w: Quantized,
    facts: Sequence[Facts | None] | None = None,
) -> None:
    """Experts `w` [n, ...], which lie where the image lies, at places of it.

    facts  of each, as far as they are known
    """
    if not is_packed_by_kernel(out):
        for i, expert in enumerate(experts):
            out.write(expert, w[i : i + 1])
        return
    with device_guard.on(out.device):
        job = start(out, experts, w, [])
        known = facts_by_scales(w) if facts is None else facts
        finish([job._replace(facts=known)])


def is_packed_by_kernel(out: PackedMatrix) -> bool:
    """Whether a kernel writes such an image where it lies."""
    return is_gpu(out.device) and agrees(out.kind, out.packed.is_gated, out.device)


def start(
    out: PackedMatrix,
    experts: Sequence[int],
    given: Quantized | Callable[[int], Quantized],
    facts: Sequence[Facts | None],
) -> Job:
    """Launch what packs experts of the image's device; nothing waits.

    given  them, or what makes one of them [1, ...]: then there is one at a time
    """
    from megamoe.engine.compile_only import launched
    from megamoe.kernels.hopper.weights import pack_on_gpu

    with launched():  # also where a call is compiled alone
        if isinstance(given, Quantized):
            counts = pack_on_gpu.launch(out.packed, experts, given)
            return Job(out, experts, functools.partial(_one_of, given), facts, counts)
        counts = torch.zeros(len(experts), dtype=torch.int32, device=out.device)
        for i, expert in enumerate(experts):
            pack_on_gpu.launch(out.packed, [expert], given(i), counts[i : i + 1])
    return Job(out, experts, given, facts, counts)


def finish(jobs: Sequence[Job]) -> None:
    """Keep what images lose, and what is known of each expert; waits once if some may lose it."""
    counts = [job.counts for job in jobs if job.out.kind in LOST]
    zeros = iter(torch.cat(counts).tolist() if counts else ())
    for out, experts, one, facts, _ in jobs:
        mine = [next(zeros) for _ in experts] if out.kind in LOST else [0] * len(experts)
        spares = [pack.spare_of(one(i)) if num else Spare() for i, num in enumerate(mine)]
        known = [pack.facts_of(one(i)) if fact is None else fact for i, fact in enumerate(facts)]
        out.aside.put_all(experts, spares, known)


def _one_of(w: Quantized, i: int) -> Quantized:
    return w[i : i + 1]


def is_gpu(device: torch.device) -> bool:
    """Whether a kernel can write there."""
    return device.type == "cuda"


@functools.cache
def agrees(kind: str, is_gated: bool, device: torch.device) -> bool:
    """Whether the kernel writes the bytes of `pack.write` here: looked at once, on one expert."""
    from megamoe.engine.compile_only import launched
    from megamoe.kernels.hopper.weights import pack_on_gpu

    name = "nvfp4" if kind == "nv_image" else "mxfp4"
    fmt, rng = format_named(name), torch.Generator().manual_seed(0)
    cols = 384  # as wide a step as that of layers: the same compilation
    shape = (1, 2, 96, cols) if is_gated else (1, 160, cols)
    codes = torch.randint(256, (*shape[:-1], cols // 2), generator=rng, dtype=torch.uint8)
    codes[..., 16:32] &= 0x88  # groups of zeros, some of them -0
    scale = torch.randint(116, 124, (*shape[:-1], cols // fmt.block[1]), generator=rng).byte()
    g = torch.ones(1) if fmt.has_global else None
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
