"""The Hopper backend: images of FP4 weights (`images.py`), and Hopper's launchers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megamoe.engine import images
from megamoe.engine.gluon import Gluon
from megamoe.engine.interface import Prepared
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantize import dequantize
from megamoe.formats.quantized import Quantized
from megamoe.kernels.gluon.dispatch import Tokens
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.gluon.pull import DEST_UNIT
from megamoe.kernels.gluon.tile_scheduler import WorkItems
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.launch import Arithmetic
from megamoe.kernels.hopper.mega import launch as mega
from megamoe.kernels.hopper.weights.pack import Packed
from megamoe.planner.launches import Launch
from megamoe.planner.tables.hopper import ACTIVATIONS


class Hopper(Gluon):
    """Hopper's kernels."""

    name = "hopper"
    launch, mega, dest_unit, activations = launch, mega, DEST_UNIT, ACTIVATIONS

    def prepare(self, weights: ExpertWeights, shared: ExpertWeights | None = None) -> Prepared:
        return images.prepared(weights) if shared is None else images.with_shared(weights, shared)

    def work_items(self, pool: Pool, weights: Sequence[Packed], step: Launch) -> WorkItems | None:
        return launch.work_items(pool, weights, step)

    def ready(self, x: Quantized, arithmetic: Arithmetic) -> Tokens:
        g = x.global_scale
        if arithmetic.is_promoted:
            assert x.scale is not None
            data = x.data if arithmetic.is_fp8 else x.data.to(torch.bfloat16)
            return Tokens(data, x.scale.contiguous(), is_ready=True)
        if g is not None:
            x = replace(x, global_scale=torch.ones_like(g))
            g = g.contiguous()
        return Tokens(dequantize(x).to(torch.bfloat16), g=g, is_ready=True)


HOPPER = Hopper()
