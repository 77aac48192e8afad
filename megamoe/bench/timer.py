"""Timing: CUDA-graph replays with the L2 cache flushed between them, contestants interleaved.

One call is captured in a graph; each replay stands between two events, and 512 MB pass through L2
before it: by a memset (which leaves the cache full of dirty lines) or by a read. Contestants take
turns in rounds, since two runs of the same code in different processes differ by several percent.
In a chain a graph holds several calls, as a model's does; they are cold because each takes other
weights than the one before it, more than L2 holds.
On a CPU the clock is `perf_counter`, and nothing is flushed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.bench.stats import Timing
from megamoe.errors import MegaMoEError, RangeError, one_of, require

FLUSH_BYTES = 512 << 20
FLUSHES = ("memset", "read", "none")
WARM_UP = 3
FEWEST = 3  # timed calls a round, however slow

Run = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is ready to be timed."""

    call: Run  # a graph's replay gives its one output tensor, which may be poisoned before
    how: str  # "graph" or "eager"


class Timer:
    """Prepares calls and times them. `budget_s` bounds the time spent on one contestant."""

    def __init__(
        self,
        device: torch.device,
        *,
        flush: str = "memset",
        repeats: int = 25,
        rounds: int = 3,
        budget_s: float = 20.0,
        chain: int = 1,
    ) -> None:
        one_of(flush, FLUSHES, "flush")
        require(
            chain == 1 or (2 <= chain <= 100 and chain % 2 == 0),
            "chain must be 1 or an even number up to 100: calls of two sets of weights take turns",
            got=chain,
            kind=RangeError,
        )
        for name, value in (("repeats", repeats), ("rounds", rounds)):
            require(
                1 <= value <= 10_000,
                f"{name} must lie between 1 and 10000",
                got=value,
                kind=RangeError,
            )
        self.device, self.repeats, self.rounds, self.budget_s = device, repeats, rounds, budget_s
        self.chain = chain
        self.on_gpu = device.type == "cuda"
        self.flush = flush if self.on_gpu else "none"
        self._buffer: Tensor | None = None
        if self.flush != "none":
            self._buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    @property
    def method(self) -> str:
        """What a reader of the figures must know."""
        shape = f"median of {self.rounds} interleaved rounds of up to {self.repeats} calls"
        if self.chain > 1:
            shape += f", each the mean of {self.chain} one behind the other"
        if not self.on_gpu:
            return f"{shape}, perf_counter on the CPU, nothing flushed"
        before = "each" if self.chain == 1 else "the first of them"
        flushed = {
            "memset": f"512 MB written through L2 before {before}",
            "read": f"512 MB read through L2 before {before}",
            "none": "L2 not flushed",
        }
        return f"{shape}, CUDA-graph replays (eager where a row says so), {flushed[self.flush]}"

    def prepare(self, run: Run, *, capture: bool = True, twin: Run | None = None) -> Prepared:
        """Warm a call up and, on a GPU, capture it in a graph; in a chain `twin` takes turns."""
        if self.chain > 1:
            run = _chained(run, twin or run, self.chain)
        if not (self.on_gpu and capture):
            run()
            self.synchronize()
            return Prepared(run, "eager")
        with torch.cuda.device(self.device):
            return Prepared(_captured(run), "graph")

    def time(self, contestants: Mapping[str, Prepared]) -> dict[str, Timing]:
        """Time all of them, interleaved: every round gives each its turn."""
        repeats = {name: self._affordable(one) for name, one in contestants.items()}
        rounds: dict[str, list[tuple[float, ...]]] = {name: [] for name in contestants}
        for _ in range(self.rounds):
            for name, one in contestants.items():
                rounds[name].append(self._round(one, repeats[name]))
        return {name: Timing(tuple(rounds[name]), one.how) for name, one in contestants.items()}

    def glance(self, one: Prepared) -> float:
        """A first idea: the median of five calls, in microseconds."""
        one.call()
        return statistics.median(self._round(one, 5))

    def cold(self, one: Prepared) -> Tensor:
        """One call after a flush, waited for."""
        with torch.cuda.device(self.device) if self.on_gpu else nullcontext():
            self._flush()
            output = one.call()
        self.synchronize()
        return output

    def synchronize(self) -> None:
        """Wait for the device; an error of an earlier launch is raised here."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _affordable(self, one: Prepared) -> int:
        """How many calls a round may hold within the budget, after warming up."""
        began = time.perf_counter()
        warmed = 0
        while warmed < WARM_UP and time.perf_counter() - began < self.budget_s / 4:
            one.call()
            self.synchronize()
            warmed += 1
        each = (time.perf_counter() - began) / warmed
        fits = int(self.budget_s / self.rounds / max(each, 1e-7))
        return min(self.repeats, max(fits, FEWEST))

    def _round(self, one: Prepared, repeats: int) -> tuple[float, ...]:
        if not self.on_gpu:
            return tuple(_clocked(one.call) / self.chain for _ in range(repeats))
        pairs = []
        with torch.cuda.device(self.device):
            for _ in range(repeats):
                self._flush()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                one.call()
                end.record()
                pairs.append((start, end))
        self.synchronize()
        return tuple(1e3 * start.elapsed_time(end) / self.chain for start, end in pairs)

    def _flush(self) -> None:
        if self._buffer is None:
            return
        if self.flush == "memset":
            self._buffer.zero_()
        else:
            torch.sum(self._buffer)


def _clocked(call: Run) -> float:
    began = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - began)


def _chained(run: Run, twin: Run, chain: int) -> Run:
    """As many calls, the last of them `run`."""

    def calls() -> Tensor:
        for _ in range(chain // 2):
            twin()
            output = run()
        return output

    return calls


def _captured(run: Run) -> Run:
    """A call that replays the graph of `run` and returns its static output."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    main.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            output = run()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise MegaMoEError(
            f"the call must be capturable in a CUDA graph; got {reason}; time it with --eager"
        ) from error

    def replay(keep: Run = run) -> Tensor:  # a graph holds addresses: `run` keeps what lies there
        graph.replay()
        return output

    return replay
