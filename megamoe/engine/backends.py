"""Backends: what is installed and works here, and why not. `auto` is the first row that works.

Which architecture a backend runs on is the planner's rule (`planner.backends`).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata

import torch

from megamoe import __version__
from megamoe.engine import certified
from megamoe.errors import DeviceError, require
from megamoe.planner.backends import reasons_on as why_not_on
from megamoe.planner.plan import OPT_IN, choose_backend
from megamoe.tested import gpu_warning, triton_warning


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute the layer."""

    name: str
    why_not: Callable[[torch.device], str]  # the reason it cannot run on a device; "" where it can
    about: str


def _portable(device: torch.device) -> str:
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    is_interpreted = device.type != "cuda" and bool(triton.knobs.runtime.interpret)
    return "" if is_interpreted else why_not_on(arch_of(device))["portable"]


def _gluon(device: torch.device, name: str) -> str:
    """Why Gluon's kernels of one architecture cannot run on a device; "" where they can."""
    try:
        import_module(f"triton.experimental.gluon.language.nvidia.{name}")
    except ImportError:
        return "needs triton 3.6 with Gluon"
    return why_not_on(arch_of(device))[name]


def _hopper(device: torch.device) -> str:
    return _gluon(device, "hopper")


def _blackwell(device: torch.device) -> str:
    return _gluon(device, "blackwell")


# Best first: `auto` takes the first one that works on the layer's device.
BACKENDS = (
    Backend("hopper", _hopper, "Gluon kernels for H100, H200 and H20"),
    Backend(
        "blackwell",
        _blackwell,
        "Gluon kernels for B200, emulated and compiled, not yet run on the hardware; opt-in",
    ),
    Backend("portable", _portable, "Triton kernels for any GPU since Ampere"),
    Backend("reference", lambda device: "", "the exact oracle in PyTorch, CPU or CUDA"),
)
NAMES = ("auto", *(backend.name for backend in BACKENDS))


def arch_of(device: torch.device) -> str:
    """What kernels for a device compile for, "sm_90", "sm_100", or "cpu"."""
    if device.type != "cuda":
        return "cpu"
    require(
        torch.cuda.is_available(), "device must be one that this torch has", got=device,
        fix='use device="cpu"', kind=DeviceError,
    )  # fmt: skip
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def reasons_on(device: torch.device) -> dict[str, str]:
    """By backend, best first: why it cannot run on `device`; "" where it can."""
    return {backend.name: backend.why_not(device) for backend in BACKENDS}


def resolve(backend: str, mode: str, device: torch.device, recipe: str | None = None) -> Backend:
    """The backend to use on `device`; refuses with the reason and names what works instead.

    recipe  of the layer: an opt-in backend is taken where its certificate has the recipe
    """
    reasons = reasons_on(device)
    name, _ = choose_backend(
        backend, mode, reasons, not_certified=not_certified(reasons, device, recipe)
    )
    return next(b for b in BACKENDS if b.name == name)


def not_certified(
    reasons: Mapping[str, str], device: torch.device, recipe: str | None = None
) -> str:
    """Why `auto` may not take the opt-in backend that works on a device; "" where it may."""
    works = [name for name, why in reasons.items() if name in OPT_IN and not why]
    return certified.why_not(works[0], device, recipe) if works else ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `doctor`: a thing, whether it is there, and what it is or why it is not."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """What this machine can do."""

    findings: tuple[Finding, ...]
    best: dict[str, str]  # device -> the backend that `auto` picks there

    def __str__(self) -> str:
        lines = [f"{'ok' if f.ok else '--':3}{f.name:24}{f.detail}" for f in self.findings]
        return "\n".join([*lines, *(f"auto on {d}: {b}" for d, b in self.best.items())])


def doctor() -> Report:
    """Look at Python, torch, Triton, the GPUs and every backend; say what works and why not."""
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", idx) for idx in range(torch.cuda.device_count())]
    findings = [
        Finding("megamoe", True, __version__),
        Finding("python", sys.version_info >= (3, 11), platform.python_version()),
        Finding("torch", True, torch.__version__),
        _package("triton", "the GPU backends", triton_warning),
        _package("safetensors", "saving weights"),
        *(_gpu(device) for device in devices[1:]),
    ]
    if len(devices) == 1:
        reason = "no NVIDIA GPU found" if torch.version.cuda else "torch is a CPU build"
        findings.append(Finding("cuda", False, f"{reason}; the reference backend runs on the CPU"))
    for backend in BACKENDS:
        reasons = {str(d): backend.why_not(d) for d in devices}
        working = [d for d, why in reasons.items() if not why]
        detail = (
            f"on {', '.join(working)}" if working else "; ".join(dict.fromkeys(reasons.values()))
        )
        findings.append(
            Finding(f"backend {backend.name}", bool(working), f"{backend.about}: {detail}")
        )
    findings += [one for device in devices for one in _certificates(device)]
    best = {str(d): resolve("auto", "auto", d).name for d in devices}
    return Report(tuple(findings), best)


def _package(name: str, use: str, warn: Callable[[str], str] = lambda version: "") -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, False, f"not installed; needed for {use}")
    why = warn(version)
    return Finding(name, not why, f"{version}: {why}" if why else version)


def _certificates(device: torch.device) -> list[Finding]:
    """Certificates that hold here, and those that are needed and do not."""
    findings = []
    for backend in BACKENDS:
        if backend.why_not(device):
            continue
        one, why = certified.found_on(backend.name, device)
        if one is not None:
            findings.append(Finding(f"certificate {backend.name}", True, f"{device}: {one}"))
        elif backend.name in OPT_IN or "stale" in why:
            findings.append(Finding(f"certificate {backend.name}", False, f"{device}: {why}"))
    return findings


def _gpu(device: torch.device) -> Finding:
    facts = torch.cuda.get_device_properties(device)
    detail = (
        f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.multi_processor_count} SMs, "
        f"{facts.total_memory / 2**30:.0f} GiB"
    )
    why = gpu_warning(facts.name)
    return Finding(str(device), True, f"{detail}; {why}" if why else detail)
