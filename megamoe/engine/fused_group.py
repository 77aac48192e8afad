"""FusedGroup: fused calls of a layer whose ranks are processes, over symmetric memory.

Every rank puts its tokens and routing into its buffer, then launches; the launch pushes them to the
ranks that own their experts, and launches synchronise on the GPU. The host never waits. A rank that
refuses its own input takes part with no tokens, so that no rank waits for it, and raises later.

A launch holds all SMs until its peers have come. So the launches of all layers of a process and
device follow each other in the order in which the host made them, whatever their streams: with two
layers on two streams one rank could begin the first and another the second, and both wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.distributed.group import check_alike
from megamoe.distributed.rendezvous import RESTART, Rendezvous
from megamoe.engine import symm_buffer
from megamoe.engine.compile_only import compiled_only
from megamoe.engine.group_memory import GroupMemory
from megamoe.engine.launch_options import MAX_S
from megamoe.engine.status import is_capturing
from megamoe.errors import (
    DTypeError,
    MegaMoETimeout,
    NotAvailable,
    RankError,
    require,
)
from megamoe.formats.quantized import Quantized
from megamoe.layout.regions import Workspace
from megamoe.planner.buckets import bucket_of
from megamoe.planner.fused import check_grid
from megamoe.planner.plan import Plan

if TYPE_CHECKING:
    from megamoe.engine.layer import MoE
    from megamoe.kernels.portable.graph_io import Inputs


def describe(plan: Plan) -> dict[str, Any]:
    """What more the ranks of fused calls must have alike."""
    return {"fits_e4m3": plan.call.fits_e4m3, "launches": plan.num_passes}


def regions(plan: Plan) -> Workspace:
    """What a rank shares with its peers."""
    return plan.exchange


class FusedGroup:
    """This rank's symmetric buffer, and its peers'. Make it on all ranks."""

    mode = "fused"

    def __init__(
        self, layer: MoE, rendezvous: Rendezvous, most: int, memory: GroupMemory | None = None
    ) -> None:
        """
        most    tokens of a rank in the largest call
        memory  that of layers that are alike; None: its own
        """
        from megamoe.kernels.gluon.mega.arguments import World

        weights = layer.weights
        plan = layer._plan_in("fused", most)
        self.num_tokens = most
        self.num_passes, self._each = plan.num_passes, plan.fused_tokens
        where = regions(plan)
        self.memory = memory or GroupMemory(layer._status)
        self._shared = self.memory.share("fused", rendezvous, where.num_bytes, weights.device)
        self.buffer = symm_buffer.symm_buffer_in(self._shared.own, where)
        peers = torch.tensor(self._shared.offsets, dtype=torch.int64, device=weights.device)
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
        self.plan = layer._plan_in("fused", most)

    def bucket(self, bound: int) -> int:
        """The bound that a call is planned for; calls of several launches always have all."""
        return bucket_of(bound, self.num_tokens) if self.has_graphs else self.num_tokens

    @property
    def why_eager(self) -> str:
        """Why no graph of the layer holds a call; "" where one does."""
        return "" if self.num_passes == 1 else f"in {self.num_passes} launches a call"

    @property
    def has_graphs(self) -> bool:
        """Whether a call can be replayed: it is one launch."""
        return not self.why_eager

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return self._shared.own.numel()

    def __deepcopy__(self, memo: Any) -> FusedGroup:
        return self  # a copied layer has the same peers

    def __call__(
        self,
        layer: MoE,
        x: Tensor | Quantized,
        topk_idx: Tensor,
        topk_weights: Tensor,
        stats: Tensor,
        check: Callable[[], None],
        bound: int | None = None,
    ) -> Tensor:
        """One call on this rank; all ranks make it. bf16 [T, H].

        bound  tokens of a rank that it is planned for, the same on all; None: `num_tokens`
        """
        status = layer._status
        status.remedy = REMEDY  # no rank knows how far its peers came
        order_after_last(layer.weights.device)  # before the buffer is written to
        refusal: Exception | None = None
        try:
            status.raise_if_seen()
            check()
            require(
                isinstance(x, Tensor),
                "a fused launch takes BF16 tokens",
                got="quantised ones",
                fix="dequantise them, or build the layer with mode='auto', 'chain' or 'staged'",
                kind=DTypeError,
            )
            assert isinstance(x, Tensor)
            self.buffer.put(x, topk_idx, topk_weights)
        except (MegaMoETimeout, RankError):
            raise  # the ranks stand at different calls
        except Exception as error:
            refusal = error
            self.buffer.num_valid.zero_()
        y = self._launch(layer, bound, stats, layer._launch.timeout_s)
        status.copy_to_host_async(layer.top_k)
        if refusal is not None:
            raise refusal
        return y[: len(x)]

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
        self.buffer.put(x, idx, torch.empty(0, layer.top_k, dtype=torch.float32, device=device))

    def warm(self, layer: MoE, bound: int | None = None) -> None:
        """A call without tokens that all ranks make once they have compiled it."""
        order_after_last(layer.weights.device)
        self.buffer.num_valid.zero_()
        self._launch(layer, bound, torch.zeros_like(layer.stats), MAX_S)
        layer._status.check(layer.top_k)

    def inputs(self, bound: int, layer: MoE) -> Inputs:
        """Where a graph of calls up to a bound finds its tokens: in the symmetric buffer."""
        from megamoe.kernels.portable.graph_io import Inputs

        b = self.buffer
        return Inputs(b.tokens[:bound], b.topk_idx[:bound], b.topk_weights[:bound], b.num_valid)

    def launch(self, layer: MoE, inputs: Inputs, bound: int) -> Tensor:
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
        from megamoe.engine import fused, images

        is_alike = self.plan.backend != "hopper" or (
            images.fits_e4m3(layer.weights) == self.plan.call.fits_e4m3
        )
        require(
            is_alike,
            "weights of a fused layer over a group must keep the range that it was built for",
            got="scales that changed what E4M3 can hold",
            fix="build the layer anew on all ranks",
            kind=NotAvailable,
        )
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


REMEDY = f"{RESTART} (ranks that pass different max_tokens may wait for each other so)"
_LAST: dict[torch.device, torch.cuda.Stream] = {}  # of the last such call over a group


def order_after_last(device: torch.device) -> None:
    """Let the current stream wait for the last call over a group on this device, fused or a chain.

    A fused launch may not take the SMs on which the rows of a chain's peers are to be computed.
    """
    if device.type != "cuda" or is_capturing(device):
        return  # who replays a graph keeps the order
    now, last = torch.cuda.current_stream(device), _LAST.get(device)
    if last is not None and now != last:
        now.wait_stream(last)
    _LAST[device] = now
