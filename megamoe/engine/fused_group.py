"""FusedGroup: fused calls of a layer whose ranks are processes, over symmetric memory.

Every rank puts its tokens and routing into its buffer, then launches; the launch pushes them to the
ranks that own their experts, and launches synchronise on the GPU.

A launch holds all SMs until its peers have come. So the launches of all layers of a process and
device follow each other in the order in which the host made them, whatever their streams: with two
layers on two streams one rank could begin the first and another the second, and both wait for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.distributed.group import check_alike
from megamoe.distributed.rendezvous import Rendezvous
from megamoe.engine import symm_buffer
from megamoe.engine.compile_only import compiled_only
from megamoe.engine.group_memory import GroupMemory
from megamoe.engine.group_mode import GroupMode, Inputs, order_after_last
from megamoe.engine.launch_options import MAX_S
from megamoe.errors import DTypeError, require
from megamoe.layout.regions import Workspace
from megamoe.planner.fused import check_grid
from megamoe.planner.plan import Plan

if TYPE_CHECKING:
    from megamoe.engine.layer import MoE
    from megamoe.kernels.portable import graph_io


def describe(plan: Plan) -> dict[str, Any]:
    """What more the ranks of fused calls must have alike."""
    return {"fits_e4m3": plan.call.fits_e4m3, "launches": plan.num_passes}


def regions(plan: Plan) -> Workspace:
    """What a rank shares with its peers."""
    return plan.exchange


class FusedGroup(GroupMode):
    """This rank's symmetric buffer, and its peers'. Make it on all ranks."""

    mode = "fused"

    def __init__(
        self, layer: MoE, rendezvous: Rendezvous, max_tokens: int, memory: GroupMemory | None = None
    ) -> None:
        """
        max_tokens  tokens of a rank in the largest call
        memory      that of layers that are alike; None: its own
        """
        from megamoe.kernels.gluon.mega.arguments import World

        plan = layer._plan_in("fused", max_tokens)
        self.num_tokens = max_tokens
        self.num_passes, self._each = plan.num_passes, plan.fused_tokens
        where = regions(plan)
        peers = self._share(layer, rendezvous, where, memory)
        self.buffer = symm_buffer.symm_buffer_in(self._shared.own, where)
        self._world = World(
            rendezvous.num_ranks, 1, rendezvous.rank, peers, self.buffer.signals, self.buffer.inbox
        )
        # Ranks that share a GPU share its SMs: all launches of a call must be resident together.
        num_sms = plan.hardware.num_sms
        taken = layer._share_sms(num_sms, self._shared.ranks_here)

        def card() -> dict[str, int]:
            check_grid(num_sms, taken, 1)
            return {"CTAs of a launch": num_sms - taken}

        check_alike(rendezvous.gather("agree on the launch", card))
        self.plan = layer._plan_in("fused", max_tokens)

    def bucket(self, bound: int) -> int:
        """The bound that a call is planned for; calls of several launches always have all."""
        return super().bucket(bound) if self.has_graphs else self.num_tokens

    @property
    def why_eager(self) -> str:
        """Why no graph of the layer holds a call; "" where one does."""
        return "" if self.num_passes == 1 else f"in {self.num_passes} launches a call"

    def _accept(self, inputs: Inputs) -> None:
        x, topk_idx, topk_weights = inputs
        require(
            isinstance(x, Tensor),
            "a fused launch takes BF16 tokens",
            got="quantised ones",
            fix="dequantise them, or build the layer with mode='auto', 'chain' or 'staged'",
            kind=DTypeError,
        )
        assert isinstance(x, Tensor)
        self.buffer.put(x, topk_idx, topk_weights, self.plan.put(len(x)))

    def _make(self, layer: MoE, inputs: Inputs | None, bound: int | None, stats: Tensor) -> Tensor:
        if inputs is None:
            self.buffer.num_valid.zero_()
        y = self._launch(layer, bound, stats, layer._launch.timeout_s)
        return y if inputs is None else y[: len(inputs[0])]

    def compile(self, layer: MoE, bound: int | None = None) -> None:
        """Compile what a call launches, and launch nothing: no rank waits for a peer's compiler."""
        if layer.weights.device.type != "cpu":
            with compiled_only():
                for dtype in (torch.int32, torch.int64):
                    self._put_nothing(layer, dtype)
        self._launch(layer, bound, torch.zeros_like(layer.stats), MAX_S, is_compiled_only=True)

    def _put_nothing(self, layer: MoE, dtype: torch.dtype) -> None:
        """The launch that puts a call's inputs into the buffer, without tokens."""
        device = layer.weights.device
        x = torch.empty(0, layer.weights.hidden, dtype=torch.bfloat16, device=device)
        idx = torch.empty(0, layer.top_k, dtype=dtype, device=device)
        gates = torch.empty(0, layer.top_k, dtype=torch.float32, device=device)
        self.buffer.put(x, idx, gates, self.plan.put(0))

    def warm(self, layer: MoE, bound: int | None = None) -> None:
        """A call without tokens that all ranks make once they have compiled it."""
        order_after_last(layer.weights.device)
        self.buffer.num_valid.zero_()
        self._launch(layer, bound, torch.zeros_like(layer.stats), MAX_S)
        layer._status.check(layer.top_k)

    def inputs(self, bound: int, layer: MoE) -> graph_io.Inputs:
        """Where a graph of calls up to a bound finds its tokens: in the symmetric buffer."""
        from megamoe.kernels.portable import graph_io

        b = self.buffer
        return graph_io.Inputs(
            b.tokens[:bound], b.topk_idx[:bound], b.topk_weights[:bound], b.num_valid
        )

    def launch(self, layer: MoE, inputs: graph_io.Inputs, bound: int) -> Tensor:
        """A call on the inputs of a graph, for its capture."""
        return self._launch(layer, bound, layer.stats, layer._launch.timeout_s)

    def _launch(
        self,
        layer: MoE,
        bound: int | None,
        stats: Tensor,
        timeout_s: float,
        *,
        is_compiled_only: bool = False,
    ) -> Tensor:
        from megamoe.engine import fused

        self._check_range(layer)
        plan, each = self.plan, self._each
        if bound is not None and bound != self.num_tokens:
            plan, each = layer._plan_in("fused", bound), bound
        assert plan.mega is not None
        parts = [
            fused.over(
                self.buffer, each, layer.weights, layer.options, self._world, stats,
                step=plan.mega, status=layer._status, timeout_s=timeout_s,
                is_poisoned=layer._launch.is_poisoned, number=number,
                is_compiled_only=is_compiled_only,
            )
            for number in range(self.num_passes)
        ]  # fmt: skip
        return parts[0] if self.num_passes == 1 else torch.cat(parts)
