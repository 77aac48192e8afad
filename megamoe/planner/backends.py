"""Which backend runs on which architecture: one rule; the engine adds what is not installed."""

from __future__ import annotations


def reasons_on(arch: str) -> dict[str, str]:
    """Why each backend cannot run on an architecture, best first; "" where it can.

    >>> reasons_on("sm_75")["portable"]
    'needs sm_80 or newer, this is sm_75'
    """
    if not arch.startswith("sm_"):
        needs = {"hopper": "an H100, H200 or H20", "blackwell": "a B200, B300 or GB200"}
        reasons = {name: f"needs {gpus}" for name, gpus in needs.items()}
        reasons["portable"] = "needs a GPU; on a CPU only Triton's interpreter runs it"
        return {**reasons, "reference": ""}
    version = int(arch.removeprefix("sm_").rstrip("af"))
    legal = {
        "hopper": (version // 10 == 9, "sm_90a"),
        "blackwell": (version // 10 == 10, "sm_100a"),
        "portable": (version >= 80, "sm_80 or newer"),
    }
    reasons = {
        name: "" if works else f"needs {what}, this is {arch}"
        for name, (works, what) in legal.items()
    }
    return {**reasons, "reference": ""}
