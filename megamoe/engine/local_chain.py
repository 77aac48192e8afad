"""LocalChain: ranks of a chain on one GPU, each on a stream and a part of the SMs of its own.

The kernels, signals and bits are those of ranks on several GPUs, but for what only links show:
latency, bandwidth and order between GPUs. `links` paces the tokens that are pulled from other ranks
to a bandwidth, so that arithmetic and links stand to each other as on several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megamoe.engine import chain
from megamoe.engine.call import Call
from megamoe.engine.captured_memory import CapturedMemory
from megamoe.engine.launch_options import LaunchOptions
from megamoe.engine.planning import Ranks, plan_for, traits_of
from megamoe.engine.status import DeviceStatus, is_capturing
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized
from megamoe.planner import chain as planned
from megamoe.planner.overrides import Overrides
from megamoe.planner.plan import Plan
from megamoe.problem import Options


class LocalChain:
    """Calls of `num_ranks` ranks over `weights`, the experts of all ranks in order."""

    def __init__(
        self,
        weights: ExpertWeights,
        num_ranks: int,
        options: Options,
        launch: LaunchOptions,
        overrides: Overrides,
        links: chain.Links | None = None,
        backend: str = "hopper",
    ) -> None:
        self._backend = backend
        self.num_ranks, self.options, self._launch = num_ranks, options, launch
        self._overrides, self.links = overrides, links
        each, device = weights.num_experts // num_ranks, weights.device
        self._all = weights
        self._weights = [weights[r * each : (r + 1) * each] for r in range(num_ranks)]
        self._status = [DeviceStatus(device) for _ in range(num_ranks)]
        self._members: list[chain.Member] = []
        self._captured = CapturedMemory(device)
        self._sizes = (0, 0)  # tokens of a rank and top_k that there is memory for
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(num_ranks)]

    def __call__(
        self,
        x: Sequence[Tensor | Quantized],
        topk_idx: Sequence[Tensor],
        topk_weights: Sequence[Tensor],
        stats: Tensor,
    ) -> list[Tensor]:
        """One call on every rank; stats int64 [E] gets what each expert received."""
        for status in self._status:
            status.raise_if_seen()
        top_k = topk_idx[0].shape[1]
        self._make(max(len(t) for t in x), top_k)
        self._captured.note()
        parts = stats.chunk(self.num_ranks)

        def launches(rank: int) -> Iterator[Tensor | None]:
            one = x[rank]
            call = Call(
                one, topk_idx[rank], topk_weights[rank], self._weights[rank], self.options,
                shared=None, status=self._status[rank], stats=parts[rank],
                timeout_s=self._launch.timeout_s,
            )  # fmt: skip
            plan = self.plan(len(one), top_k, is_quantized=not isinstance(one, Tensor))
            return chain.phases(self._members[rank], call, plan, self.links)

        with torch.no_grad():
            y = self._side_by_side(launches)
        for status in self._status:
            status.copy_to_host_async(top_k)
        return y

    def plan(self, num_tokens: int, top_k: int, *, is_quantized: bool = False) -> Plan:
        """What a rank launches in a call with so many tokens of its own."""
        w = self._all
        max_tokens = max(num_tokens, self._sizes[0])
        return plan_for(
            w, self.options, traits_of(self._backend, w, None), num_tokens=num_tokens, top_k=top_k,
            overrides=self._overrides, is_quantized=is_quantized,
            ranks=Ranks(self.num_ranks, w.num_experts, self.num_ranks, max_tokens=max_tokens),
        )  # fmt: skip

    def check(self, top_k: int) -> None:
        """Wait for the GPU and raise what calls so far found."""
        for status in self._status:
            status.check(top_k)

    def reset(self) -> None:
        """Wait for the GPU and make the ranks usable after a timeout."""
        for status in self._status:
            status.reset()
        self._captured.clear()
        self._members, self._sizes = [], (0, 0)

    def _side_by_side(self, launches: Callable[[int], Iterator[Tensor | None]]) -> list[Tensor]:
        """Every rank on its own stream, or, where there is no GPU, in its own thread."""
        ranks, device = range(self.num_ranks), self._all.device
        if not self._streams:
            with ThreadPoolExecutor(self.num_ranks) as pool:
                return list(pool.map(lambda rank: _last(launches(rank)), ranks))
        now = torch.cuda.current_stream(device)
        all_ranks = [launches(rank) for rank in ranks]
        outputs: list[Tensor] = []
        for stream in self._streams:
            stream.wait_stream(now)
        try:
            while not outputs:
                for one, stream in zip(all_ranks, self._streams, strict=True):
                    with torch.cuda.stream(stream):
                        y = next(one)
                    if y is not None:
                        outputs.append(y)
        except BaseException:
            torch.cuda.synchronize(device)  # ranks that were launched still read what is let go
            raise
        for y, stream in zip(outputs, self._streams, strict=True):
            now.wait_stream(stream)
            if not is_capturing(device):
                y.record_stream(now)
        return outputs

    def _make(self, num_tokens: int, top_k: int) -> None:
        """Memory of every rank, as large as the largest call so far."""
        had, had_k = self._sizes
        if self._members and had >= num_tokens and had_k == top_k:
            return
        self._captured.replace(self._members)
        max_tokens, device = max(num_tokens, had, 1), self._all.device
        where = planned.memory(self.plan(max_tokens, top_k).call, self._backend)
        with torch.inference_mode(False):
            memory = [
                torch.zeros(where.num_bytes, dtype=torch.uint8, device=device)
                for _ in range(self.num_ranks)
            ]
            first = [m.data_ptr() for m in memory]
            away = [torch.tensor([at - own for at in first], device=device) for own in first]
        self._members = [
            chain.Member(chain.buffer_in(m, where), peers, rank, self.num_ranks)
            for rank, (m, peers) in enumerate(zip(memory, away, strict=True))
        ]
        self._sizes = (
            max_tokens,
            top_k,
        )  # not before: where there is no such memory, there is the old


def _last(phases: Iterator[Tensor | None]) -> Tensor:
    """All of a rank's launches; its result."""
    with torch.no_grad():  # which is a thread's own
        *_, y = phases
    assert y is not None
    return y
