"""megamoe: a Mixture-of-Experts layer as one fast call. See README.md for the tour."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Where each public name lives. `import megamoe` costs nothing: torch loads with the first use.
_HOME = {
    "Checkpoint": "engine.loader",
    "ExpertWeights": "engine.weights",
    "Hardware": "hardware",
    "MegaMoEError": "errors",
    "MoE": "engine.layer",
    "Placement": "balance.placement",
    "Plan": "planner.plan",
    "Problem": "problem",
    "Quantized": "formats.quantized",
    "Router": "routing.spec",
    "dequantize": "formats.quantize",
    "doctor": "engine.backends",
    "moe": "engine.functional",
    "plan": "planner.plan",
    "quantize": "formats.quantize",
    "route": "routing.router",
    "simulate": "simulator.simulate",
    "warmup": "engine.warm",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'megamoe' has no attribute {name!r}")
    return getattr(import_module(f"megamoe.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
