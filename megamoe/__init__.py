"""megamoe: a Mixture-of-Experts layer as one fast call. See README.md for the tour."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives. `import megamoe` costs nothing: torch loads with the first use.
_HOME = {
    "CapacityError": "errors",
    "Checkpoint": "engine.loader",
    "DTypeError": "errors",
    "DeviceError": "errors",
    "ExpertWeights": "engine.weights",
    "FileError": "errors",
    "GraphPool": "engine.graph_pool",
    "Hardware": "hardware",
    "LocalRanks": "engine.local",
    "MegaMoEError": "errors",
    "MegaMoETimeout": "errors",
    "MoE": "engine.layer",
    "NotAvailable": "errors",
    "Options": "problem",
    "Placement": "balance.placement",
    "Plan": "planner.plan",
    "Problem": "problem",
    "Quantized": "formats.quantized",
    "RangeError": "errors",
    "RankError": "errors",
    "Router": "routing.spec",
    "ShapeError": "errors",
    "Statistics": "balance.statistics",
    "dequantize": "formats.quantize",
    "doctor": "engine.backends",
    "moe": "engine.functional",
    "plan": "planner.plan",
    "propose": "balance.placement",
    "quantize": "formats.quantize",
    "route": "routing.router",
    "simulate": "simulator.simulate",
    "warmup": "engine.warm",
}
__all__ = [
    "CapacityError", "Checkpoint", "DTypeError", "DeviceError", "ExpertWeights", "FileError",
    "GraphPool", "Hardware", "LocalRanks",
    "MegaMoEError", "MegaMoETimeout", "MoE", "NotAvailable", "Options", "Placement",
    "Plan", "Problem", "Quantized", "RangeError", "RankError", "Router", "ShapeError", "Statistics",
    "dequantize", "doctor", "moe", "plan", "propose", "quantize", "route", "simulate", "warmup",
]  # fmt: skip

if TYPE_CHECKING:  # the same names, for type checkers and completion
    from megamoe.balance.placement import Placement, propose
    from megamoe.balance.statistics import Statistics
    from megamoe.engine.backends import doctor
    from megamoe.engine.functional import moe
    from megamoe.engine.graph_pool import GraphPool
    from megamoe.engine.layer import MoE
    from megamoe.engine.loader import Checkpoint
    from megamoe.engine.local import LocalRanks
    from megamoe.engine.warm import warmup
    from megamoe.engine.weights import ExpertWeights
    from megamoe.errors import (
        CapacityError,
        DeviceError,
        DTypeError,
        FileError,
        MegaMoEError,
        MegaMoETimeout,
        NotAvailable,
        RangeError,
        RankError,
        ShapeError,
    )
    from megamoe.formats.quantize import dequantize, quantize
    from megamoe.formats.quantized import Quantized
    from megamoe.hardware import Hardware
    from megamoe.planner.plan import Plan, plan
    from megamoe.problem import Options, Problem
    from megamoe.routing.router import route
    from megamoe.routing.spec import Router
    from megamoe.simulator.simulate import simulate
else:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'megamoe' has no attribute {name!r}")
        return getattr(import_module(f"megamoe.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
