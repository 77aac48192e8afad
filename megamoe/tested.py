"""Which versions were run together; `doctor` reads it, and a test holds docs/install.md to it.

torch's wheels for CUDA require one Triton each, so the two are chosen together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tested:
    """Versions that were run together, and what was run."""

    torch: str
    triton: str
    python: str
    gpu: str  # "" is none
    driver: str
    what: str


# fmt: off
TESTED = (
    Tested("2.11.0", "3.6.0", "3.12", "NVIDIA H200", "580.159.04", "GPU tests, benchmarks"),
    Tested("2.13.0", "3.6.0", "3.11", "",            "",           "CPU tests, interpreter"),
)
# fmt: on
# Newer Tritons at which configurations were compiled for sm_90a, sm_100a and sm_103a without a GPU,
# spread over all kinds (scripts/newer_triton.sh); nothing of them was run.
COMPILED = ("3.7.1", "3.8.0", "3.9.0")
# The Triton that torch's CUDA wheels for Linux require, as their metadata says.
TRITON_OF_TORCH = {"2.9": "3.5", "2.10": "3.6", "2.11": "3.6", "2.12": "3.7", "2.13": "3.7",
                   "2.14": "3.8", "2.15": "3.9"}  # fmt: skip


def minor(version: str) -> str:
    """The first two numbers.

    >>> minor("3.6.0+git1"), minor("2.11.0+cu130")
    ('3.6', '2.11')
    """
    return ".".join(version.split("+")[0].split(".")[:2])


def triton_warning(version: str) -> str:
    """What to know of this Triton; "" where it was tested."""
    known = sorted({minor(t.triton) for t in TESTED})
    if minor(version) in known:
        return ""
    how = "compiled there, never run" if minor(version) in map(minor, COMPILED) else "untested"
    return (
        f"{how}; tested is {' and '.join(known)}. The Hopper kernels change compiled code by a "
        "compiler hook: check results with `megamoe certify` before use"
    )


def gpu_warning(name: str) -> str:
    """What to know of this GPU; "" where it was tested."""
    known = sorted({t.gpu for t in TESTED if t.gpu})
    return (
        ""
        if any(gpu in name for gpu in known)
        else f"never run on it by us; tested is {', '.join(known)}; run `megamoe certify`"
    )
