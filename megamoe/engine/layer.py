"""MoE: the layer as a torch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megamoe.balance.placement import Placement
from megamoe.balance.statistics import Statistics
from megamoe.engine import (
    backends,
    device_guard,
    group_calls,
    group_graphs,
    parallel,
    partition,
    status,
)
from megamoe.engine.bounds import check_fits, check_num_experts
from megamoe.engine.call import Call
from megamoe.engine.expert_module import ExpertModule, letting_go, megabytes
from megamoe.engine.fingerprint import counted
from megamoe.engine.functional import (
    Signature,
    check_shared,
    check_tokens,
    choose,
    run,
    signature_of,
)
from megamoe.engine.graph_pool import GraphPool
from megamoe.engine.graphs import Graphs, Parts
from megamoe.engine.group_op import group_moe_op, handle_of
from megamoe.engine.launch_options import LaunchOptions
from megamoe.engine.op import describe, moe_op
from megamoe.engine.planning import LOG, ONE_RANK, Ranks, Traits, plan_for, traits_of
from megamoe.engine.refresh import Refresh
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, ShapeError, require
from megamoe.formats.quantized import Quantized
from megamoe.planner.buckets import UpTo, group_modes, quantized_mode
from megamoe.planner.choice import Value
from megamoe.planner.overrides import CHOICES, Overrides, check_pairs, checked
from megamoe.planner.plan import Plan
from megamoe.problem import Options, check_top_k

if TYPE_CHECKING:
    from megamoe.distributed.group import GroupWorld


MAX_CHECKED = 4096  # shapes of calls that are remembered as checked


class MoE(nn.Module):
    """A Mixture-of-Experts layer over the experts of one rank.

    weights              this rank's experts
    num_experts          over all ranks
    top_k                experts of a token: the columns of topk_idx
    group                torch.distributed process group, or None for one rank; all its ranks build
                         the same layer and make the same calls (docs/expert-parallel.md)
    max_tokens_per_rank  refuse larger calls (no token is ever dropped); None is no limit, which
                         fused calls and the chain over a group do not take
    placement            which experts lie on which rank; None: contiguous, each once
    mode                 "staged", "fused" (one launch, docs/fused.md), "split" (L1 and L2 side by
                         side, docs/split.md), over a group also "chain"
                         (docs/expert-parallel.md), or "auto": the same bits; what a mode cannot
                         take is refused; `why` says what `auto` came to
    timeout_s            bound of every wait for another rank; in a fused launch at most 60
    overlap_launches     place each kernel while the one before it ends; None: on Hopper, where
                         decode is up to 7% faster with it (docs/hopper.md)
    cuda_graphs          replay calls of up to 2048 BF16 tokens from graphs, one per bucket of token
                         counts, over a group of bounds: the same bits, less time on the host; a
                         `GraphPool` has them share memory with other layers'. Without a GPU calls
                         are eager, and so are staged ones over a group
    reserve_sms          SMs that fused launches leave to others
    debug_poison         fill the memory of fused launches with NaN before each
    pool_rows            rows of the pool of fused launches, of split and of the chain: a call with
                         more runs in waves or passes; None: enough rows for all
    overrides            tile choices in place of the planner's, such as {"block_m": 64}; refused
                         with the reason where no kernel can (docs/change-a-tile.md)
    stats                int64 [E_local], added to by every call: tokens each local expert received
    shared               experts that see every token with weight 1, in any recipe; None: none
    backend              "auto", "reference", "portable", "hopper" or "blackwell" (`mm.doctor()`;
                         the last is emulated and compiled, not yet run on the hardware)

    activation, clamp, weight_at, combine and fast_math are those of `Options`.

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
        cuda_graphs: bool | GraphPool = False,
        reserve_sms: int = 0,
        debug_poison: bool = False,
        pool_rows: int | None = None,
        overrides: Mapping[str, Value] | None = None,
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
        self._chosen = checked(
            {
                "reserve_sms": reserve_sms,
                "pool_rows": pool_rows,
                "overlap_launches": overlap_launches,
            }
        ) + checked(overrides or {}, legal=CHOICES)
        check_pairs(backend, self._chosen)
        self._launch = LaunchOptions(timeout_s, debug_poison)
        require(
            isinstance(cuda_graphs, (bool, GraphPool)), "cuda_graphs must be a bool or a GraphPool",
            got=cuda_graphs, kind=DTypeError,
        )  # fmt: skip
        self._wants_graphs = bool(cuda_graphs)
        self._graph_pool = cuda_graphs if isinstance(cuda_graphs, GraphPool) else GraphPool()
        self._graphs: Graphs | None = None
        self._has_group, self._world = group is not None, None
        self._fused_group: group_calls.GroupCalls | None = None
        self._own_sms = reserve_sms
        self._ranks, self._why_staged = ONE_RANK, ""

        def build(num_ranks: int) -> Placement:
            self._options = Options(activation, clamp, weight_at, combine, fast_math)
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
            self._fused_group, self._why_staged = group_calls.join(self, self._world)
            zeros = torch.zeros(num_experts, dtype=torch.int64, device=weights.device)
            self.register_buffer("_sent", counted(zeros), persistent=False)
            self._handle = handle_of(self)

    @classmethod
    def empty(
        cls,
        recipe: str,
        num_experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> MoE:
        """A layer without weights, for `load_state_dict`.

        num_experts  of the layer, all of them here
        top_k        experts of a token: the columns of topk_idx
        device   where its tensors lie; "meta": nowhere yet, until `to_empty(device=...)`; None:
                 torch's default device

        A call before the first load computes zeros, and the log `megamoe` says so once.
        options  the other arguments of the class
        """
        weights = ExpertWeights.empty(recipe, num_experts, hidden, intermediate, device)
        layer = cls(weights, num_experts, top_k, **options)
        layer.experts.owns = True  # no other layer has them: a load may write in place
        layer.experts.is_blank = True
        return layer

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
            not (self._has_group and self._wants_graphs and self._wanted[1] == "staged"),
            "staged calls over a group wait for the GPU, and no graph can hold them",
            got="cuda_graphs=True with mode='staged'",
            fix="use mode='auto', 'fused' or 'chain'",
            kind=NotAvailable,
        )
        placement = parallel.placement_of(self.num_experts, num_ranks, weights, placement)
        backends.resolve(*self._wanted, weights.device)  # refuse before anything is built
        if self._has_group:
            physical = weights.num_experts * num_ranks
            self._ranks = Ranks(num_ranks, physical, 1, not placement.is_contiguous, limit)
        self.experts = ExpertModule(weights)
        self.shared = None if shared is None else ExpertModule(shared)
        self.register_buffer(
            "stats",
            counted(torch.zeros(weights.num_experts, dtype=torch.int64, device=weights.device)),
            persistent=False,
        )
        self._refresh()
        self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]
        return placement

    @property
    def options(self) -> Options:
        """The activation, its clamp and what else the results depend on."""
        return self._options

    @options.setter
    def options(self, value: object) -> None:
        require(
            False, "a layer's options must stay as it was built", got=value,
            fix="build the layer anew: compiled models and graphs hold these", kind=NotAvailable,
        )  # fmt: skip

    @property
    def mode(self) -> str:
        """As asked for; over a group what `auto` came to, or "auto" where sizes differ."""
        if self._world is None:
            return self._wanted[1]
        return "staged" if self._fused_group is None else self._fused_group.mode

    def plan(
        self, num_tokens: int, *, max_tokens: int | None = None, is_quantized: bool = False
    ) -> Plan:
        """What a call launches, and why. Print it.

        num_tokens    of the call, on this rank; 0 is legal
        is_quantized  whether tokens come as `mm.Quantized`
        max_tokens    over a group: the bound that the call is made with (None: that of the layer);
                      mode and tile follow from it

        Staged launches over a group are those of even routing.
        """
        self._renew()
        if self._fused_group is not None:
            calls, bound = self._fused_group.pick(max_tokens, is_quantized=is_quantized)
            mode = "staged" if calls is None else self._wanted[1]
            return self._plan_in(mode, bound, num_tokens, is_quantized=is_quantized)
        weights, shared = self._parts()
        traits = traits_of(self._backend, weights, shared)
        return self._plan(num_tokens, traits, is_quantized=is_quantized)

    def _plan_in(
        self,
        mode: str,
        bound: int | None = None,
        num_tokens: int | None = None,
        *,
        is_quantized: bool = False,
    ) -> Plan:
        """Over a group: the plan of a call in a mode.

        bound       tokens of a rank that it is planned for; None: those of the layer
        num_tokens  of this rank; None: as many
        """
        weights, shared = self._parts()
        ranks = self._ranks
        if bound is not None:
            ranks = ranks._replace(max_tokens=bound, shared_tokens=ranks.max_tokens)
        most = ranks.max_tokens or 1
        return plan_for(
            weights, self.options, traits_of(self._backend, weights, shared),
            num_tokens=most if num_tokens is None else num_tokens, top_k=self.top_k,
            overrides=self._overrides(mode), ranks=ranks, is_quantized=is_quantized,
        )  # fmt: skip

    def _modes(self) -> tuple[tuple[UpTo, ...], UpTo | None]:
        """Over a group: what `auto` takes by the bound of a call, and for quantised tokens."""
        if self._backend == "hopper":
            call, overrides = self._plan_in("staged").call, dict(self._overrides("auto"))
            return group_modes(call, overrides), quantized_mode(call, overrides)
        most = self.max_tokens_per_rank or 0
        plans = (self._plan_in("auto", is_quantized=ready) for ready in (False, True))
        one, ready = (UpTo(most, plan.mode, plan.why) for plan in plans)
        return (one,), ready

    def _share_sms(self, num_sms: int, ranks_here: int) -> int:
        """Share a GPU's SMs with the ranks that use it too; -> those that are left to others."""
        taken = num_sms - (num_sms - self._own_sms) // ranks_here
        rest = tuple(pair for pair in self._chosen if pair[0] != "reserve_sms")
        self._chosen = (("reserve_sms", taken), *rest)
        return taken

    def _plan(
        self, num_tokens: int, traits: Traits, *, is_quantized: bool = False, mode: str = ""
    ) -> Plan:
        """mode  "": the layer's own"""
        return plan_for(
            self.weights, self.options, traits, num_tokens=num_tokens, top_k=self.top_k,
            overrides=self._overrides(mode or self.mode), ranks=self._ranks,
            is_quantized=is_quantized,
        )  # fmt: skip

    @property
    def why(self) -> str:
        """Why the layer has its backend and mode: what was asked for, or what `auto` passed over.

        `plan(num_tokens)` has the reasons of each size.
        """
        asked = {"auto": "the best that works here"}
        backend = self._why_backend or asked.get(self._wanted[0], "asked for")
        text = f"backend {self._backend}: {backend}"
        if self._world is not None:
            mode = self._why_staged if self._fused_group is None else self._fused_group.why
            return f"{text}; mode {self.mode}: {mode}"
        mode = "by the size of each call" if self._wanted[1] == "auto" else "asked for"
        if self._backend == "reference":
            mode = "computed by the oracle: the same result, no launches"
        return f"{text}; mode {self._wanted[1]}: {mode}"

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
        max_tokens: int | None = None,
        copy: bool = True,
    ) -> Tensor:
        """bf16 [T, H] (or Quantized), int [T, top_k], float32 [T, top_k] -> bf16 [T, H].

        x     the tokens, bf16 [T, H], or `Quantized` in the recipe's activation format
        max_tokens  over a group: tokens that no rank exceeds in this call, the same number on all
                    ranks; what runs follows from it. None: `max_tokens_per_rank`
        copy  with `cuda_graphs`, False gives the graph's own output: read it before the next call
              of this layer, or of any in the same `GraphPool`, which may overwrite it
        """
        if torch.compiler.is_compiling():
            assert isinstance(x, Tensor), "a compiled model passes BF16 tokens"
            if self._world is not None:
                over: Tensor = group_moe_op(
                    x, topk_idx, topk_weights, self.stats, self._sent, self._handle, max_tokens
                )
                return over
            tensors = [*self.experts.each(), *(self.shared.each() if self.shared else ())]
            status = self._status.storage
            y: Tensor = moe_op(
                x, topk_idx, topk_weights, tensors, self.stats, status, self._what, max_tokens
            )
            return y
        graphs = self._graphs
        signature = signature_of(x, topk_idx, topk_weights)
        if graphs is not None and self._world is None:
            one = graphs.find(signature)
            if one is not None and self._is_current(one.parts):
                if max_tokens is not None:
                    check_fits(x, max_tokens, self.max_tokens_per_rank)
                return graphs.replay(one, x, topk_idx, topk_weights, copy)  # type: ignore[arg-type]
        self._renew()
        if self._world is not None:
            if graphs is not None:
                replayed = group_graphs.replay(
                    self, signature, (x, topk_idx, topk_weights), max_tokens, copy
                )
                if replayed is not None:
                    return replayed
            return self._call_over_group(
                x, topk_idx, topk_weights, self.stats, self._sent, max_tokens
            )
        graphs = self._graphs
        self._check_once(signature, x, topk_idx, topk_weights, max_tokens)
        if graphs is not None and graphs.serves(x):
            assert isinstance(x, Tensor) and signature is not None
            return graphs(signature, x, topk_idx, topk_weights, self._captured_parts(), copy=copy)
        call = self._call(x, topk_idx, topk_weights)
        traits = traits_of(self._backend, call.weights, call.shared)
        plan = self._plan(x.shape[0], traits, is_quantized=not isinstance(x, Tensor))
        with torch.no_grad():
            return run(call, plan)

    def _call(self, x: Tensor | Quantized, topk_idx: Tensor, topk_weights: Tensor) -> Call:
        weights, shared = self._parts()
        return Call(
            x, topk_idx, topk_weights, weights, self.options, shared,
            status=self._status, stats=self.stats, timeout_s=self._launch.timeout_s,
            is_poisoned=self._launch.is_poisoned,
        )  # fmt: skip

    def _check_once(
        self,
        signature: Signature | None,
        x: Tensor | Quantized,
        idx: Tensor,
        weights: Tensor,
        max_tokens: int | None,
    ) -> None:
        """The checks of a call; a call that looks like one that passed is not checked again."""
        if signature not in self._checked:
            self._check(x, idx, weights)
        check_fits(x, max_tokens, self.max_tokens_per_rank)
        if signature is not None and len(self._checked) < MAX_CHECKED:
            self._checked.add(signature)

    def _call_over_group(
        self,
        x: Tensor | Quantized,
        topk_idx: Tensor,
        topk_weights: Tensor,
        stats: Tensor,
        sent: Tensor,
        max_tokens: int | None = None,
    ) -> Tensor:
        """The call over the group; what one rank refuses, all refuse if it is staged."""
        assert self._world is not None
        grad = torch.is_grad_enabled()
        calls, bound = None, 0
        if self._fused_group is not None:
            is_quantized = isinstance(x, Quantized)  # what is neither is refused in BF16's mode
            calls, bound = self._fused_group.pick(max_tokens, is_quantized=is_quantized)

        def check() -> None:
            if calls is None:
                self._status.raise_if_seen()
            with torch.set_grad_enabled(grad):
                self._check(x, topk_idx, topk_weights)
            if calls is not None or max_tokens is not None:  # else the ranks compare theirs
                check_fits(x, max_tokens, self.max_tokens_per_rank)

        with torch.no_grad(), device_guard.on(self.weights.device):
            if calls is not None:
                y = calls(self, x, topk_idx, topk_weights, stats, check, bound)
            else:
                compute = self._compute(stats)
                y = self._world.run(compute, x, topk_idx, topk_weights, check)
                self._status.copy_to_host_async(self.top_k)
            parallel.add_counts(sent, topk_idx)
        return y

    def _compute(self, stats: Tensor) -> parallel.RankCompute:
        """What this rank computes of a staged call over the group."""
        weights, shared = self._parts()
        traits = traits_of(self._backend, weights, shared)

        def plan(num_tokens: int, is_quantized: bool) -> Plan:
            return self._plan(num_tokens, traits, is_quantized=is_quantized, mode="staged")

        make = parallel.COMPUTE[self._backend]
        return make(weights, shared, self.options, self.num_experts, stats, plan, self._status)

    def _parts(self) -> tuple[ExpertWeights, ExpertWeights | None]:
        """The experts as they were when they were last looked at, as every call does."""
        shared = self.shared
        return self.experts.last, None if shared is None else shared.last

    def _captured_parts(self) -> Parts:
        weights, shared = self._parts()
        return Parts(
            self._backend, weights, self.options, shared, self._status, self.stats, self.top_k,
            self._launch, self._call_overrides,
        )  # fmt: skip

    def _is_current(self, parts: Parts) -> bool:
        """Whether `_captured_parts` are these; a module's own look-ups would take 4 us."""
        backend, weights, options, shared, status, stats, top_k, launch_options, overrides = parts
        mine = self.__dict__
        other = mine["_modules"].get("shared")
        return (
            mine["_modules"]["experts"].look() is weights
            and (None if other is None else other.look()) is shared
            and mine["_buffers"]["stats"] is stats
            and (
                mine["_options"] is options and mine["top_k"] is top_k and mine["_status"] is status
            )
            and (mine["_launch"] is launch_options and mine["_backend"] is backend)
            and mine["_call_overrides"] is overrides
        )

    def _check(self, x: Tensor | Quantized, topk_idx: Tensor, topk_weights: Tensor) -> None:
        weights, shared = self._parts()
        if self.experts.is_blank:
            self.experts.is_blank = False
            LOG.warning("a layer of MoE.empty was called before any experts were loaded: zeros")
        check_tokens(x, topk_idx, topk_weights, weights, self.num_experts)
        check_shared(shared, x, weights)
        check_num_experts(topk_idx, self.top_k)

    @property
    def sent(self) -> Tensor:
        """int64 [num_experts]: rows that this rank's tokens asked each expert for."""
        return self.stats if self._world is None else self._sent

    def statistics(self) -> Statistics:
        """What all ranks sent and received so far; over a group, all ranks call it."""
        return parallel.statistics(self, self._world)

    def save_stats(self, path: str | Path) -> None:
        """`statistics()` as a file for `megamoe balance`; over a group rank 0 writes it."""
        statistics = self.statistics()
        if self._world is None or self._world.rank == 0:
            statistics.save(path)

    def check(self) -> None:
        """Wait for the GPU and raise what calls so far found: bad ids or weights, a timeout."""
        self._status.check(self.top_k)

    def refresh(
        self,
        w13: Tensor | Quantized | None = None,
        w2: Tensor | Quantized | None = None,
        *,
        experts: Sequence[int] | None = None,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        gate_up: str = "split",
        shared: bool = False,
    ) -> None:
        """Other values for experts, in the same memory: graphs that were captured use them.

        w13      BF16, FP32 or FP16 [n, 2I, H], quantised to the recipe as `ExpertWeights.quantize`
                 does, or Quantized [n, 2, I, H] in the recipe's format; None: as they are
        w2       the same of [n, H, I]
        experts  the n local experts that are written; None: all, in order
        b13, b2  biases [n, 2I] and [n, H], or None
        gate_up  order of the rows of w13 and b13 in floats: "split" or "interleaved"
        shared   True: of the shared experts

        Checked whole before anything is written: shapes, NaN, and values that would need another
        kernel, which are refused, as are experts that another layer has too. The memory is that of
        the tensors that the layer was built from. Values may lie anywhere; beside the layer one
        expert at a time is in memory. The writes are on the current stream. Over a group all ranks
        call it, each for its own experts; what one refuses, all refuse.
        """
        self._renew()
        module = self.shared if shared else self.experts
        require(
            module is not None, "the layer must have shared experts", got="none", kind=ShapeError
        )
        assert module is not None
        values = w13, w2, experts, b13, b2, gate_up
        if self._world is None:
            module.require_own_memory()
            Refresh.of(module.weights, *values).apply(module.weights)
            module.is_blank = False
            return
        parts: list[Refresh] = []

        def check() -> None:
            module.require_own_memory()
            parts.append(Refresh.of(module.weights, *values))
            parts[0].check(module.weights)

        self._world.rendezvous.gather("refresh", check)
        parts[0].write(module.weights)
        module.is_blank = False

    def reset(self) -> None:
        """Wait for the GPU and make the layer usable after a timeout of a fused launch."""
        require(
            self._fused_group is None,
            f"mode {self.mode} over a group cannot be reset: ranks may stand at different calls",
            got="reset()",
            fix="build the layer anew on all ranks",
            kind=NotAvailable,
        )
        self._status.reset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._world is None and str(self.weights.device) != self._at:
            self._refresh()  # torch.load(map_location=...)
        if self._world is not None:  # a copy is another layer to a compiled model
            self._handle = handle_of(self)
        if self._fused_group is not None:  # a copy's calls go through the same memory
            self._status = self._fused_group.status

    def _refresh(self) -> None:
        """What depends on the device: status, graphs, and what a compiled model passes."""
        weights, shared = self._parts()
        self._launch.check()
        self._at = str(weights.device)
        name, traits, why = choose(*self._wanted, weights, shared, self.options.activation)
        self._backend, self._why_backend = name, why
        if not why and name == "portable" and self._wanted[0] == "auto":
            self._why_backend = backends.reasons_on(weights.device)["hopper"]
        weights, shared = self._pack_experts(name)
        if shared is not None:  # which may lie after the others only now
            traits = traits_of(name, weights, shared, self.options.activation)
        self._check_plan(traits)
        before = self.__dict__.get("_status")
        if before is None or before.storage.device != weights.device:  # others would be forgotten
            self._status = status.DeviceStatus(weights.device)
        self._call_overrides: Overrides = self._overrides(self._wanted[1])
        self._what = describe(
            weights, shared, self.options, name, self._launch, self._call_overrides,
            top_k=self.top_k, max_tokens=self.max_tokens_per_rank,
        )  # fmt: skip
        self._checked: set[Signature] = set()
        has_graphs = self._wants_graphs and name != "reference"
        self._graphs = Graphs(self._largest_replay(), self._graph_pool) if has_graphs else None

    def _pack_experts(self, backend: str) -> tuple[ExpertWeights, ExpertWeights | None]:
        """The experts as the backend reads them: one copy."""
        weights, shared = self._parts()
        if backend == "hopper":
            from megamoe.engine import images

            with letting_go(self.experts, self.shared):
                experts = images.hold(weights, shared)
        else:
            experts = weights.canonical(), None if shared is None else shared.canonical()
        self._set_experts(experts)
        return experts

    def _set_experts(self, experts: tuple[ExpertWeights, ExpertWeights | None]) -> None:
        self.experts.take(experts[0])
        if self.shared is not None and experts[1] is not None:
            self.shared.take(experts[1])

    def _overrides(self, mode: str) -> Overrides:
        return (("backend", self._backend), ("mode", mode), *self._chosen)

    def _check_plan(self, traits: Traits) -> None:
        """Refuse what no call of the layer could follow: a plan of one token has all of it."""
        if self._has_group:
            self._plan_in("staged")
        else:
            partition.prepare(self._plan(1, traits), self.weights.device)

    def _largest_replay(self) -> int | None:
        """Tokens of the largest graph: in mode fused those that one launch takes."""
        max_tokens = self.max_tokens_per_rank
        if self._wanted[1] != "fused" or self._has_group:
            return max_tokens
        fits = self.plan(1).max_fused_tokens
        return fits if max_tokens is None else min(max_tokens, fits)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        if self._graphs is not None:
            self._graphs.drop()  # they hold the tensors that are about to be moved
        was_meta = self.stats.is_meta
        self._pack_on(fn(torch.empty(0, dtype=torch.float32, device=self.stats.device)).device)

        def move(t: Tensor) -> Tensor:  # never a cast: counts stay counts
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        if was_meta and not self.stats.is_meta:  # to_empty: nothing may be read out of these bytes
            each = (*self.experts.each(), *(self.shared.each() if self.shared else ()))
            for t in (*each, self.stats):
                t.view(torch.uint8).zero_()
        self._refresh()
        return self

    def _pack_on(self, device: torch.device) -> None:
        """Experts that move to a Hopper GPU are packed on the way, an expert at a time."""
        weights, shared = self._parts()
        if "meta" in (device.type, weights.device.type) or device == weights.device:
            return
        if weights.is_packed or weights.recipe in ("bf16", "w8a8"):
            return
        name = choose(*self._wanted, weights, shared, self.options.activation, device)[0]
        if name == "hopper":
            from megamoe.engine import images

            self._set_experts(images.hold_on(device, weights, shared))

    def _renew(self) -> None:
        """After load_state_dict, or where buffers were replaced: other bytes, perhaps on another
        device."""
        modules = [one for one in (self.experts, self.shared) if one is not None]
        for one in modules:
            one.look()
        loaded = [one for one in modules if one.was_loaded]
        if not loaded:
            return
        for one in loaded:
            one.was_loaded = False
        try:
            self._follow()
        except BaseException:
            for one in loaded:
                one.was_loaded = True  # the next call may not go on with half of it
            raise
        for one in loaded:
            one.owns |= one.last.is_packed  # the images are of what was loaded

    def _follow(self) -> None:
        """Make what goes with other experts."""
        device = self.weights.device
        if self.stats.device != device:
            self.stats = torch.zeros(self.stats.shape, dtype=torch.int64, device=device)
        if self._graphs is not None:
            self._graphs.drop()  # once the GPU is done with them
        if self._world is None:
            self._refresh()
        else:
            self._pack_experts(self._backend)

    def extra_repr(self) -> str:
        w, world, o = self.weights, self._world, self.options
        ranks = "" if world is None else f" on rank {world.rank} of {world.num_ranks}"
        limit = "" if o.limit == float("inf") else f", clamp={o.limit:g}"
        usual = Options(o.activation, o.clamp)
        other = "".join(
            f", {name}={getattr(o, name)}"
            for name in ("weight_at", "combine", "fast_math")
            if getattr(o, name) != getattr(usual, name)
        )
        return (
            f"{w.recipe}, {w.num_experts} experts{ranks}, top_k={self.top_k}, hidden={w.hidden}, "
            f"intermediate={w.intermediate}, activation={o.activation}{limit}{other}, "
            f"backend={self.backend}, mode={self.mode}, {megabytes(w.nbytes)}"
            + (", CUDA graphs" if self._wants_graphs else "")
        )


def _after_load(layer: MoE, _: object) -> None:
    """Compiled models pass what `_renew` makes: images and what they are, status words, counts."""
    modules = [one for one in (layer.experts, layer.shared) if one is not None]
    devices = {t.device for one in modules for t in one.each()}
    if len(devices) > 1:
        return  # a part of it: the rest is to come
    if layer.backend == "hopper" or devices != {layer.stats.device}:
        layer._renew()
    else:
        for one in modules:
            one.look()  # kernels read dense tensors
