"""What this machine has proven: certificates of opt-in backends, for `auto` and `doctor`."""

from __future__ import annotations

import functools
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from megamoe import __version__, certificate
from megamoe.certificate import Certificate, Machine
from megamoe.planner.backends import reasons_on
from megamoe.planner.plan import OPT_IN

DRIVER_FILE = Path("/proc/driver/nvidia/version")


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """What a certificate made on this device holds for."""
    gpu, capability, driver = platform.machine(), "cpu", "none"
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        gpu, capability, driver = facts.name, f"{facts.major}.{facts.minor}", driver_version()
    return Machine(
        gpu=gpu,
        capability=capability,
        driver=driver,
        triton=version_of("triton"),
        torch=torch.__version__,
        megamoe=__version__,
        code=certificate.code_digest(),
    )


def why_not(backend: str, device: torch.device, recipe: str | None = None) -> str:
    """Why `auto` may not take an opt-in backend on a device; "" where it may.

    recipe  of the layer; None: of any
    """
    return certificate.find(backend, machine_of(device), recipe)[1] if backend in OPT_IN else ""


def is_certified(device: torch.device, arch: str, recipe: str) -> bool:
    """The trait of a call: whether `auto` may take the opt-in backend of this architecture."""
    works = [name for name, why in reasons_on(arch).items() if name in OPT_IN and not why]
    return bool(works) and not why_not(works[0], device, recipe)


def found_on(backend: str, device: torch.device) -> tuple[Certificate | None, str]:
    """The certificate of any backend on a device, or why there is none that holds."""
    return certificate.find(backend, machine_of(device))


@functools.cache
def driver_version() -> str:
    """The NVIDIA driver, as the kernel module says; where that is hidden, as nvidia-smi does."""
    try:
        match = re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)\s", DRIVER_FILE.read_text())
    except OSError:
        match = None
    if match is not None:
        return match[1]
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.split() or ["unknown"])[0]


def version_of(package: str) -> str:
    """The version of an installed package, or "none"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
