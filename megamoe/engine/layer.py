"""MoE: the layer as a torch module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megamoe.engine import backends, faults, fused_group, parallel
from megamoe.engine.across import across_op, handle_of
from megamoe.engine.functional import Looks, check_shared, check_tokens, choose, looks_of, run
from megamoe.engine.graphs import Graphs, Parts
from megamoe.engine.held import Held
from megamoe.engine.manner import Manner
from megamoe.engine.op import describe, moe_op
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import CapacityError, DTypeError, NotAvailable, ShapeError, require
from megamoe.formats.quantized import Quantized
from megamoe.problem import Options, check_top_k
from megamoe.schedule.placement import Placement
from megamoe.schedule.statistics import Statistics

if TYPE_CHECKING:
    from megamoe.distributed.group import GroupWorld


MOST_PASSED = 4096  # shapes of calls that are remembered as checked


class MoE(nn.Module):
    """A Mixture-of-Experts layer over the experts of one rank.

    weights              this rank's experts; `num_experts` counts over all ranks
    group                torch.distributed process group, or None for one rank; all its ranks build
                         the same layer and make the same calls (docs/expert-parallel.md)
    max_tokens_per_rank  refuse larger calls (no token is ever dropped); None is no limit, which
                         fused calls over a group do not take
    placement            which experts stand on which rank; None: contiguous, each once
    mode                 "staged", "fused" (one launch, docs/fused.md) or "auto": the same bits;
                         over a group `auto` is fused where all ranks can, or `why_staged` says why
    timeout_s            bound of every wait for another rank; in a fused launch at most 60
    overlap_launches     place each kernel while the one before it ends; None: on Hopper, where
                         decode is up to 7% faster with it (docs/hopper.md)
    cuda_graphs          replay calls of up to 2048 BF16 tokens from graphs, one per bucket of token
                         counts: the same bits, less time on the host; without a GPU calls are eager
    reserve_sms          SMs that fused launches leave to others
    debug_poison         fill the memory of fused launches with NaN before each
    pool_rows            rows of the pool of fused launches: a call with more runs in waves; None is
                         room for all
    stats                int64 [E_local], added to by every call: tokens each local expert received

    Fused calls of a layer share its counters: each waits for the one before, whatever their
    streams, and graphs of yours that hold such calls must be replayed one after the other.
    Casts such as `.half()` leave the experts' bytes alone; `.to(device)` moves them.
    """

    stats: Tensor
    _sent: Tensor
    _world: GroupWorld | None

    def __init__(
        self,
        weights: ExpertWeights,
        num_experts: int,
        top_k: int,
        *,
        group: Any = None,
        max_tokens_per_rank: int | None = None,
        placement: Placement | None = None,
        timeout_s: float = 300.0,
        overlap_launches: bool | None = None,
        cuda_graphs: bool = False,
        reserve_sms: int = 0,
        debug_poison: bool = False,
        pool_rows: int | None = None,
        activation: str = "swiglu",
        clamp: float | None = None,
        weight_at: str = "l1",
        combine: str = "bf16",
        fast_math: bool = False,
        shared: ExpertWeights | None = None,
        backend: str = "auto",
        mode: str = "auto",
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.max_tokens_per_rank = max_tokens_per_rank
        self._wanted = (backend, mode)
        self._manner = Manner(
            mode, overlap_launches, timeout_s, reserve_sms, debug_poison, pool_rows
        )
        self._wants_graphs = cuda_graphs
        self._graphs: Graphs | None = None
        self._has_group, self._world = group is not None, None
        self._fused_group: fused_group.FusedGroup | None = None
        self.why_staged = ""  # over a group: why its calls are not fused

        def build(num_ranks: int) -> Placement:
            self.options = Options(activation, clamp, weight_at, combine, fast_math)
            return self._build(weights, shared, placement, num_ranks)

        if group is None:
            require(
                build(1).is_contiguous,
                "a placement needs a group",
                got="experts in another order on one rank",
                fix="order the weights with weights.take",
                kind=ShapeError,
            )
        else:
            self._world = parallel.join(self, build, group, timeout_s)
            self._fused_group, self.why_staged = fused_group.join(self, self._world)
            zeros = torch.zeros(num_experts, dtype=torch.int64, device=weights.device)
            self.register_buffer("_sent", zeros, persistent=False)
            self._handle = handle_of(self)

    def _build(
        self,
        weights: ExpertWeights,
        shared: ExpertWeights | None,
        placement: Placement | None,
        num_ranks: int,
    ) -> Placement:
        """Check everything that this rank brings, and hold it."""
        require(
            isinstance(weights, ExpertWeights),
            "weights must be an ExpertWeights",
            got=type(weights).__name__,
            kind=DTypeError,
        )
        check_top_k(self.top_k, self.num_experts)
        limit = self.max_tokens_per_rank
        require(
            limit is None or limit >= 0,
            "max_tokens_per_rank must not be negative",
            got=limit,
            kind=ShapeError,
        )
        require(
            not (self._has_group and self._wants_graphs),
            "a layer over a process group keeps no graphs of its own",
            got="cuda_graphs=True with a group",
            fix="capture calls of mode='fused' yourself; staged ones wait for the GPU",
            kind=NotAvailable,
        )
        placement = parallel.placement_of(self.num_experts, num_ranks, weights, placement)
        backends.resolve(*self._wanted, weights.device)  # refuse before anything is built
        self.experts = Held(weights)
        self.shared = None if shared is None else Held(shared)
        self.register_buffer(
            "stats",
            torch.zeros(weights.num_experts, dtype=torch.int64, device=weights.device),
            persistent=False,
        )
        self._settle()
        return placement

    @property
    def mode(self) -> str:
        """As asked for; over a group what `auto` came to."""
        if self._world is None:
            return self._wanted[1]
        return "staged" if self._fused_group is None else "fused"

    @property
    def backend(self) -> str:
        """The backend of the device that the experts lie on."""
        return self._backend

    @property
    def weights(self) -> ExpertWeights:
        """The experts, where they lie now."""
        return self.experts.weights

    def forward(
        self,
        x: Tensor | Quantized,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        copy: bool = True,
    ) -> Tensor:
        """bf16 [T, H] (or Quantized), int [T, top_k], float32 [T, top_k] -> bf16 [T, H].

        copy  with `cuda_graphs`, False gives the graph's own output, which the next call of about
              as many tokens overwrites
        """
        if torch.compiler.is_compiling():
            assert isinstance(x, Tensor), "a compiled model passes BF16 tokens"
            if self._world is not None:
                return across_op(x, topk_idx, topk_weights, self.stats, self._sent, self._handle)
            tensors = [*self.experts.buffers(), *(self.shared.buffers() if self.shared else ())]
            return moe_op(
                x, topk_idx, topk_weights, tensors, self.stats, self._faults.words, self._what
            )
        graphs = self._graphs  # none over a group
        looks = looks_of(x, topk_idx, topk_weights)
        if graphs is not None:
            one = graphs.find(looks)
            if one is not None and self._has(one.parts):
                return graphs.replay(one, x, topk_idx, topk_weights, copy)  # type: ignore[arg-type]
        elif self._world is not None:
            return self._across(x, topk_idx, topk_weights, self.stats, self._sent)
        self._check_once(looks, x, topk_idx, topk_weights)
        if graphs is not None and graphs.serves(x):
            assert isinstance(x, Tensor) and looks is not None
            return graphs(looks, x, topk_idx, topk_weights, self._captured_parts(), copy=copy)
        weights, shared = self._parts()
        with torch.no_grad():
            return run(
                self.backend, x, topk_idx, topk_weights, weights, self.options, shared,
                self._faults, self.stats, manner=self._manner,
            )  # fmt: skip

    def _check_once(
        self, looks: Looks | None, x: Tensor | Quantized, idx: Tensor, weights: Tensor
    ) -> None:
        """The checks at the door; a call that looks like one that passed is not checked again."""
        if looks in self._passed:
            return
        self._check(x, idx, weights)
        limit = self.max_tokens_per_rank
        require(
            limit is None or x.shape[0] <= limit,
            f"a call may hold at most max_tokens_per_rank = {limit} tokens",
            got=x.shape[0],
            fix="split the batch or build the layer for more",
            kind=CapacityError,
        )
        if looks is not None and len(self._passed) < MOST_PASSED:
            self._passed.add(looks)

    def _across(
        self,
        x: Tensor | Quantized,
        topk_idx: Tensor,
        topk_weights: Tensor,
        stats: Tensor,
        sent: Tensor,
    ) -> Tensor:
        """The call over the group; what one rank refuses, all refuse, but for fused calls."""
        assert self._world is not None
        grad = torch.is_grad_enabled()

        def check() -> None:
            with torch.set_grad_enabled(grad):
                self._check(x, topk_idx, topk_weights)

        with torch.no_grad():
            if self._fused_group is not None:
                y = self._fused_group(self, x, topk_idx, topk_weights, stats, check)
            else:
                calc = parallel.CALCS[self.backend](
                    *self._parts(), self.options, self.num_experts, stats
                )
                y = self._world.run(calc, x, topk_idx, topk_weights, check)
            parallel.add_counts(sent, topk_idx)
        return y

    def _parts(self) -> tuple[ExpertWeights, ExpertWeights | None]:
        return self.experts.weights, None if self.shared is None else self.shared.weights

    def _captured_parts(self) -> Parts:
        weights, shared = self._parts()
        return Parts(
            self._backend, weights, self.options, shared, self._faults, self.stats, self.top_k,
            self._manner,
        )  # fmt: skip

    def _has(self, parts: Parts) -> bool:
        """Whether `_captured_parts` are these; a module's own look-ups would take 4 us."""
        backend, weights, options, shared, found, stats, top_k, manner = parts
        mine = self.__dict__
        other = mine["_modules"].get("shared")
        return (
            mine["_modules"]["experts"]._weights is weights
            and (None if other is None else other.weights) is shared
            and mine["_buffers"]["stats"] is stats
            and (mine["options"] is options and mine["top_k"] is top_k and mine["_faults"] is found)
            and (mine["_manner"] is manner and mine["_backend"] is backend)
        )

    def _check(self, x: Tensor | Quantized, topk_idx: Tensor, topk_weights: Tensor) -> None:
        weights, shared = self._parts()
        check_tokens(x, topk_idx, topk_weights, weights, self.num_experts)
        check_shared(shared, x, weights)
        require(
            topk_idx.shape[1] == self.top_k,
            f"topk_idx must be [T, {self.top_k}]",
            got=tuple(topk_idx.shape),
            kind=ShapeError,
        )

    @property
    def sent(self) -> Tensor:
        """int64 [num_experts]: rows that this rank's tokens asked each expert for."""
        return self.stats if self._world is None else self._sent

    def statistics(self) -> Statistics:
        """What all ranks sent and received so far; over a group, all ranks call it."""
        return parallel.statistics(self, self._world)

    def save_stats(self, path: str | Path) -> None:
        """`statistics()` as a file for `megamoe balance`; over a group rank 0 writes it."""
        found = self.statistics()
        if self._world is None or self._world.rank == 0:
            found.save(path)

    def check(self) -> None:
        """Wait for the GPU and raise what calls so far found: bad ids or weights, a timeout."""
        self._faults.check(self.top_k)

    def reset(self) -> None:
        """Wait for the GPU and make the layer usable after a timeout of a fused launch."""
        require(
            self._fused_group is None,
            "a fused layer over a group cannot be reset: its ranks may stand at different calls",
            got="reset()",
            fix="build the layer anew on all ranks",
            kind=NotAvailable,
        )
        self._faults.reset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._world is not None:  # a copy is another layer to a compiled model
            self._handle = handle_of(self)

    def _take(self, mode: str) -> None:
        """Have another mode from now on."""
        self._wanted = (self._wanted[0], mode)
        self._manner = replace(self._manner, mode=mode)
        self._settle()

    def _settle(self) -> None:
        """What depends on the device: faults, graphs, and what a compiled model passes."""
        weights, shared = self._parts()
        self._manner.check(weights, shared)
        name = choose(*self._wanted, weights, shared, self.options.activation)
        if self._has_group:
            name = parallel.backend_over_group(*self._wanted, name)
        self._backend = name
        if self._fused_group is None:  # otherwise a cast would forget a timeout
            self._faults = faults.Faults(weights.device)
        self._what = describe(weights, shared, self.options, name, self._manner)
        self._passed: set[Looks] = set()
        has_graphs = self._wants_graphs and name != "reference"
        self._graphs = Graphs(self.max_tokens_per_rank) if has_graphs else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        if self._graphs is not None:
            self._graphs.drop()  # they hold the tensors that are about to be moved
        super()._apply(fn, recurse)
        self._settle()
        return self

    def extra_repr(self) -> str:
        w, world = self.weights, self._world
        ranks = "" if world is None else f" on rank {world.rank} of {world.num_ranks}"
        return (
            f"{w.recipe}, {w.num_experts} experts{ranks}, top_k={self.top_k}, hidden={w.hidden}, "
            f"intermediate={w.intermediate}, backend={self.backend}, {w.nbytes / 2**20:.0f} MiB"
            + (", CUDA graphs" if self._wants_graphs else "")
            + (", fused" if self._fused_group is not None else "")
        )
