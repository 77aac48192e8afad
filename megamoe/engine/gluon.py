"""What the backends in Gluon, Hopper's and Blackwell's, have in common: all but weights and tiles.

Tokens go to a pool sorted by expert, both GEMMs read it tile by tile, and L2 writes each row to its
slot. Weights are packed or placed once; nothing is rounded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megamoe.engine.call import Call
from megamoe.engine.interface import Backend, Prepared, SlotRows
from megamoe.engine.staged import routing_of
from megamoe.engine.staged import run as run_staged
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.formats.quantized import Quantized
from megamoe.kernels.gluon.dispatch import Tokens, route
from megamoe.kernels.gluon.follow import Chain
from megamoe.kernels.gluon.pool import Pool
from megamoe.kernels.gluon.tile_scheduler import WorkItems
from megamoe.kernels.portable.routing import Routing
from megamoe.planner.launches import Gemm, GemmSwapAb, GemmTmem, Launch, Pass
from megamoe.planner.plan import Plan
from megamoe.problem import Options


class Gluon(Backend):
    """Gluon's kernels of one architecture.

    launch       its launchers: `pool`, `gated`, `linear`
    mega         its fused launcher
    dest_unit    values of a unit of a row's destination on another rank
    activations  that its epilogues compute
    """

    launch: Any
    mega: Any
    dest_unit: int
    activations: tuple[str, ...]

    @abstractmethod
    def prepare(self, weights: ExpertWeights, shared: ExpertWeights | None = None) -> Prepared:
        """As in `Backend`; `shared` are experts of the same launches, and come last."""

    @abstractmethod
    def ready(self, x: Quantized, arithmetic: Any) -> Tokens:
        """Tokens that come quantised, in the pool's format."""

    def work_items(self, pool: Pool, weights: Sequence[Any], step: Launch) -> WorkItems | None:
        """Room for the work items of linears of one grid, where their tile has any."""
        return None

    def tokens(self, x: Tensor | Quantized, weights: ExpertWeights, arithmetic: Any) -> Tokens:
        """Tokens as dispatch takes them."""
        if isinstance(x, Quantized):
            return self.ready(x, arithmetic)
        return Tokens(x, g=weights.x_global)

    def check_activation(self, options: Options) -> None:
        """Refuse an activation that the kernels would take for another."""
        require(
            options.activation in self.activations,
            f"the {self.name} backend computes {' and '.join(self.activations)}",
            got=options.activation,
            fix='use backend="portable"',
            kind=NotAvailable,
        )

    def run(self, call: Call, plan: Plan) -> Tensor:
        if plan.mega is not None:
            from megamoe.engine import fused

            return fused.run(call, plan.mega)
        return run_staged(self, call, plan)

    def rows(
        self,
        call: Call,
        plan: Plan,
        steps: Pass,
        out: SlotRows,
        first_slot: int = 0,
        routing: Routing | None = None,
    ) -> None:
        self.check_activation(call.options)
        weights, options, pdl = call.weights, call.options, plan.overlaps
        packed = self.prepare(weights, call.shared)
        arithmetic, l1, l2 = packed.arithmetic, steps["l1"], steps["l2"]
        routing = routing_of(call) if routing is None else routing
        sizes = steps.num_experts, tile_in(steps).block_m, weights.device
        pool = self.launch.pool(arithmetic, steps.num_slots, weights.hidden, *sizes)
        work = self.work_items(pool, (packed.w13, packed.w2), l1)
        route(
            self.tokens(call.x, weights, arithmetic), routing, arithmetic.acts, pool, steps,
            work=work, stats=call.stats, first_slot=first_slot, num_dest=out.data.shape[1],
            num_shared=call.num_shared, by_group=arithmetic.to_e4m3, pdl=pdl,
        )  # fmt: skip
        acts = self.launch.pool(arithmetic, steps.num_slots, weights.intermediate, *sizes, pool)
        first, second = ({}, {}) if work is None else ({"items": one} for one in work.each())
        self.launch.gated(
            pool, packed.w13, acts, l1, arithmetic, options, bias=weights.b13,
            acts_factor=weights.acts_global, error=routing.error, use_pdl=pdl, **first,
        )  # fmt: skip
        self.launch.linear(
            acts, packed.w2, out.data, l2, arithmetic, options, bias=weights.b2,
            acts_factor=weights.acts_global, error=routing.error, use_pdl=pdl,
            chain=Chain(after=packed.w13), **second,
        )  # fmt: skip


def tile_in(steps: Pass) -> Gemm | GemmSwapAb | GemmTmem:
    """The tile of both linears of a pass."""
    tile = steps["l1"].config
    assert isinstance(tile, Gemm | GemmSwapAb | GemmTmem)
    return tile
