"""LocalRanks: several ranks of a layer on one GPU, in one fused launch or as chains side by side.

Fused: the kernel, counters and barriers are those of one rank; each rank owns SMs / ranks, its part
of the experts and a symmetric buffer, through whose address all others reach it. Chains are in
`local_chain`. Bit for bit the result of one rank over all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megamoe.engine import backends, device_guard, symm_buffer
from megamoe.engine.captured_memory import CapturedMemory
from megamoe.engine.chain import Links
from megamoe.engine.functional import check_tokens
from megamoe.engine.launch_options import MAX_S, LaunchOptions
from megamoe.engine.local_chain import LocalChain
from megamoe.engine.planning import Ranks, hardware_of, plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError, one_of, require
from megamoe.planner.choice import Value
from megamoe.planner.fused import check_grid
from megamoe.planner.overrides import TILE, checked
from megamoe.planner.plan import Plan
from megamoe.planner.tables.hopper import MAX_RANKS
from megamoe.problem import Options

MAX_LATENCY_US = 1000.0  # of a link that ranks on one GPU pretend


class LocalRanks:
    """Several ranks of a layer on one GPU: expert parallelism, tried without several GPUs.

    Calls take and return a list, one tensor a rank. Bit for bit the result of one rank over all
    tokens. `stats`, int64 [E], counts the tokens that each expert received. Calls can be captured
    once one as large, with that top_k, was made; larger calls leave such graphs their memory, until
    `reset`.

    weights    the experts of all ranks, in order
    num_ranks  1 to 8, each with its share of the SMs and of the experts
    options    what the layer computes; None: `mm.Options()`
    mode       "fused", or "chain" for calls of any size
    links_gbs  chain: GB/s at which a rank pulls others' tokens, and at which its rows for others go
               home, at most; None: as fast as it can
    latency_us  chain: from asking others for tokens until they are there, at least
    backend    "hopper", or "blackwell" (emulated and compiled, not yet run on the hardware)
    timeout_s, reserve_sms, debug_poison, pool_rows, overrides   as in `MoE`
    """

    def __init__(
        self,
        weights: ExpertWeights,
        num_ranks: int,
        options: Options | None = None,
        *,
        timeout_s: float = MAX_S,
        reserve_sms: int = 0,
        debug_poison: bool = False,
        mode: str = "fused",
        pool_rows: int | None = None,
        links_gbs: float | None = None,
        latency_us: float = 0.0,
        overrides: Mapping[str, Value] | None = None,
        backend: str = "hopper",
    ) -> None:
        self.weights, self.num_ranks, self.options = weights, num_ranks, options or Options()
        self._launch = LaunchOptions(timeout_s, debug_poison)
        _check_mode(mode, links_gbs, latency_us)
        routes: dict[str, Value | None] = {
            "mode": mode,
            "reserve_sms": reserve_sms,
            "pool_rows": pool_rows,
        }
        tile = dict(checked(overrides or {}, legal=TILE))
        one_of(backend, ("hopper", "blackwell"), "backend")
        self._backend = backend
        self._chosen = checked({"backend": backend, **routes, **tile})
        require(
            1 <= num_ranks <= MAX_RANKS,
            f"one launch runs 1 to {MAX_RANKS} ranks",
            got=num_ranks,
            kind=ShapeError,
        )
        require(
            weights.num_experts % num_ranks == 0,
            "all ranks must hold as many experts",
            got=f"{weights.num_experts} experts over {num_ranks} ranks",
            kind=ShapeError,
        )
        device = weights.device
        backends.resolve(backend, mode, device)
        self._launch.check()
        check_grid(hardware_of(device).num_sms, reserve_sms, num_ranks)
        self.stats = torch.zeros(weights.num_experts, dtype=torch.int64, device=device)
        self._status = DeviceStatus(device, ranks=num_ranks)
        self._top_k = 1
        self._buffers: list[symm_buffer.SymmBuffer] = []
        self._peers = torch.empty(0, dtype=torch.float32)
        self._captured = CapturedMemory(device)
        self._chain: LocalChain | None = None
        if mode == "chain":
            links = None
            if links_gbs is not None or latency_us:
                speed = float("inf") if links_gbs is None else links_gbs * 1e9
                links = Links(speed, latency_s=latency_us / 1e6)
            self._chain = LocalChain(
                weights, num_ranks, self.options, self._launch, self._chosen, links, backend
            )

    def __call__(
        self, x: Sequence[Tensor], topk_idx: Sequence[Tensor], topk_weights: Sequence[Tensor]
    ) -> list[Tensor]:
        """One call on every rank: bf16 [T_r, H] each -> bf16 [T_r, H] each; T_r may differ."""
        from megamoe.engine import fused
        from megamoe.kernels.gluon.mega.arguments import World

        counts = self._check(x, topk_idx, topk_weights)
        if self._chain is not None:
            self._top_k = topk_idx[0].shape[1]
            return self._chain(x, topk_idx, topk_weights, self.stats)
        self._status.raise_if_seen()
        max_tokens = max(counts)
        if max_tokens == 0:
            return [torch.empty_like(t) for t in x]
        self._top_k = topk_idx[0].shape[1]
        plan = self.plan(max_tokens, self._top_k)
        step = plan.mega
        assert step is not None
        self._make_buffers(max_tokens)
        self._captured.note()
        num = self.num_ranks
        with torch.no_grad(), device_guard.on(self.weights.device):
            self._status.order_after_last()  # before the buffers are written to
            calls = zip(self._buffers, x, topk_idx, topk_weights, strict=True)
            for buffer, own, ids, gates in calls:
                buffer.put(own, ids, gates, plan.put(len(own)))
            y = fused.over(
                self._buffers[0], max_tokens, self.weights, self.options,
                World(num, num, 0, self._peers, self._buffers[0].signals, self._buffers[0].inbox),
                self.stats, step=step, status=self._status,
                timeout_s=self._launch.timeout_s, is_poisoned=self._launch.is_poisoned,
            )  # fmt: skip
            self._status.copy_to_host_async(self._top_k)
        return [part[:count] for part, count in zip(y.chunk(self.num_ranks), counts, strict=True)]

    def plan(self, num_tokens: int, top_k: int) -> Plan:
        """What a call launches.

        num_tokens  on the fullest rank
        """
        if self._chain is not None:
            return self._chain.plan(num_tokens, top_k)
        return plan_for(
            self.weights, self.options, traits_of(self._backend, self.weights, None),
            num_tokens=num_tokens, top_k=top_k, overrides=self._chosen,
            ranks=Ranks(self.num_ranks, self.weights.num_experts, self.num_ranks),
        )  # fmt: skip

    def check(self) -> None:
        """Wait for the GPU and raise what calls so far found: bad ids or weights, a timeout."""
        if self._chain is not None:
            self._chain.check(self._top_k)
        self._status.check(self._top_k)

    def reset(self) -> None:
        """Wait for the GPU and make the ranks usable after a timeout; capture graphs anew."""
        self._status.reset()
        self._buffers = []
        self._captured.clear()
        if self._chain is not None:
            self._chain.reset()

    def _make_buffers(self, num_tokens: int) -> None:
        """A buffer for every rank, as large as the largest call so far, each an allocation."""
        device = self.weights.device
        if self._buffers:
            had, top_k = self._buffers[0].topk_idx.shape
            if had >= num_tokens and top_k == self._top_k:
                return
        self._captured.replace((self._buffers, self._peers))
        where = self.plan(num_tokens, self._top_k).exchange
        with torch.inference_mode(False):
            memory = [
                torch.zeros(where.num_bytes, dtype=torch.uint8, device=device)
                for _ in range(self.num_ranks)
            ]
            first = memory[0].data_ptr()
            self._peers = torch.tensor([m.data_ptr() - first for m in memory], device=device)
        self._buffers = [symm_buffer.symm_buffer_in(m, where) for m in memory]

    def _check(
        self, x: Sequence[Tensor], topk_idx: Sequence[Tensor], topk_weights: Sequence[Tensor]
    ) -> list[int]:
        """The tokens of each rank."""
        for name, each in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            require(
                len(each) == self.num_ranks,
                f"{name} must have one entry for each of {self.num_ranks} ranks",
                got=len(each),
                kind=ShapeError,
            )
        for one in zip(x, topk_idx, topk_weights, strict=True):
            check_tokens(*one, self.weights)
            require(
                isinstance(one[0], Tensor) or self._chain is not None,
                "a fused launch takes BF16 tokens",
                got="quantised ones",
                fix="dequantise them, or use mode='staged' of MoE",
                kind=DTypeError,
            )
        alike = {(idx.dtype, idx.shape[1]) for idx in topk_idx}
        require(
            len(alike) == 1,
            "topk_idx of all ranks must have one dtype and top_k",
            got=sorted(map(str, alike)),
            kind=ShapeError,
        )
        return [len(t) for t in x]


def _check_mode(mode: str, links_gbs: float | None, latency_us: float) -> None:
    """Refuse modes and links that ranks of one GPU do not have."""
    require(
        mode not in ("staged", "split"),
        "ranks on one GPU are one fused launch or a chain",
        got=f"mode {mode!r}",
        fix="staged ranks are processes: MoE(group=...), over gloo or a GPU each; mode split parts "
        "the SMs of a whole GPU: MoE(mode='split')",
        kind=NotAvailable,
    )
    one_of(mode, ("fused", "chain"), "mode")
    require(
        mode == "chain" or (links_gbs is None and not latency_us),
        "links are paced between ranks of a chain",
        got=f"links_gbs={links_gbs}, latency_us={latency_us} with mode='fused'",
        fix="leave them out, or use mode='chain'",
        kind=NotAvailable,
    )
    require(
        (links_gbs is None or links_gbs > 0) and 0 <= latency_us <= MAX_LATENCY_US,
        f"links must have a bandwidth, and a latency of 0 to {MAX_LATENCY_US:.0f} us",
        got=f"links_gbs={links_gbs}, latency_us={latency_us}",
        kind=RangeError,
    )
