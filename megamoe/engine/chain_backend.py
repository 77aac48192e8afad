"""What a chain asks of an architecture: weights as its kernels read them, pools, and both GEMMs.

The launches between ranks (`kernels/gluon/exchange.py`, `pull.py`) are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized
from megamoe.kernels.gluon.dispatch import Tokens
from megamoe.problem import Options


class ChainBackend(NamedTuple):
    """One architecture's part."""

    name: str
    launch: Any  # its launchers: `pool`, `gated`, `linear`
    prepared: Callable[[ExpertWeights], Any]  # -> w13, w2 and `how` it computes with them
    ready: Callable[[Quantized, Any], Tokens]  # tokens that come quantised, in the pool's format
    check_activation: Callable[[Options], None]
    shared_rows: Callable[..., None]
    dest_unit: int  # values of a unit of a row's destination


def chain_backend(name: str) -> ChainBackend:
    """The part of a backend that has mode chain."""
    if name == "blackwell":
        from megamoe.engine import blackwell
        from megamoe.kernels.blackwell import launch as tmem_launch

        return ChainBackend(
            name, tmem_launch, blackwell.prepare, blackwell.ready, blackwell.check_activation,
            blackwell.shared_rows, tmem_launch.DEST_UNIT,
        )  # fmt: skip
    from megamoe.engine import hopper, images
    from megamoe.kernels.gluon import pull
    from megamoe.kernels.hopper import launch

    return ChainBackend(
        name, launch, images.prepared, hopper.ready, hopper.check_activation, hopper.shared_rows,
        pull.DEST_UNIT,
    )  # fmt: skip
