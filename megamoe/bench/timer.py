"""Timing: CUDA-graph replays with the L2 cache flushed between them, contestants shuffled.

One call is captured in a graph; each replay stands between two events, and 512 MB pass through L2
before it: by a memset (which leaves the cache full of dirty lines) or by a read. The calls of all
contestants are shuffled one by one: in blocks, a contestant that follows a slow one gains up to 15%
by the power cap, and two runs of the same code in different processes differ by several percent.
A graph may hold several calls, each after a dense product, as a model's does. A product
reads more than L2 holds; the time of products alone is taken off: what is left is what calls add.
On a CPU the clock is `perf_counter`, and nothing is flushed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.bench.inputs import normal
from megamoe.bench.stats import Timing
from megamoe.errors import MegaMoEError, NotAvailable, RangeError, one_of, require

FLUSH_BYTES = 512 << 20
FLUSHES = ("memset", "read", "none")
WARM_UP = 3
FEWEST = 3  # timed calls a round, however slow
DENSE_WIDTH = 8192  # of the dense products between calls: their BF16 matrices are larger than L2
DENSE_NUM = 4  # matrices, which take turns
DENSE_TOKENS = 64

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
        graph_calls: int = 1,
    ) -> None:
        one_of(flush, FLUSHES, "flush")
        limits = {"repeats": 10_000, "rounds": 10_000, "graph_calls": 100}
        for name, value in (("repeats", repeats), ("rounds", rounds), ("graph_calls", graph_calls)):
            require(
                1 <= value <= limits[name],
                f"{name} must lie between 1 and {limits[name]}",
                got=value,
                kind=RangeError,
            )
        self.device, self.repeats, self.rounds, self.budget_s = device, repeats, rounds, budget_s
        self.graph_calls = graph_calls
        self.on_gpu = device.type == "cuda"
        self.flush = flush if self.on_gpu else "none"
        self._buffer: Tensor | None = None
        if self.flush != "none":
            self._buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._between = _Products(device) if self.on_gpu and graph_calls > 1 else None
        self._bare: Run | None = None  # the products without the calls

    @property
    def method(self) -> str:
        """What a reader of the figures must know."""
        shape = f"median of {self.rounds} rounds of up to {self.repeats} calls, "
        shape += "contestants shuffled call by call"
        if self.graph_calls > 1:
            shape += f", each the mean of {self.graph_calls} in a row"
        if not self.on_gpu:
            return f"{shape}, perf_counter on the CPU, nothing flushed"
        if self.graph_calls > 1:
            dense = f"a dense product of {2 * DENSE_WIDTH**2 // 10**6} MB"
            shape += f" and after {dense}, whose time is taken off"
        before = "each" if self.graph_calls == 1 else "the first of them"
        flushed = {
            "memset": f"512 MB written through L2 before {before}",
            "read": f"512 MB read through L2 before {before}",
            "none": "L2 not flushed",
        }
        return f"{shape}, CUDA-graph replays (eager where a row says so), {flushed[self.flush]}"

    def prepare(self, run: Run, *, capture: bool = True) -> Prepared:
        """Warm a call up and, on a GPU, capture it in a graph, or as many as a graph holds."""
        require(
            capture or self._between is None,
            "calls after dense products stand in a CUDA graph",
            got="a contestant, or --eager, that allows none",
            fix="time it alone, after a flush",
            kind=NotAvailable,
        )
        if self.graph_calls > 1:
            run = self._many(run)
        if not (self.on_gpu and capture):
            run()
            self.synchronize()
            return Prepared(run, "eager")
        with torch.cuda.device(self.device):
            return Prepared(_captured(run), "graph")

    def time(self, contestants: Mapping[str, Prepared]) -> dict[str, Timing]:
        """Time all of them; in every round their calls are shuffled, each time in another order."""
        repeats = {name: self._affordable(one) for name, one in contestants.items()}
        order = [name for name, count in repeats.items() for _ in range(count)]
        rounds: dict[str, list[tuple[float, ...]]] = {name: [] for name in contestants}
        rng = random.Random(0)
        for _ in range(self.rounds):
            rng.shuffle(order)
            times = self._counted([contestants[name].call for name in order])
            samples: dict[str, list[float]] = {name: [] for name in contestants}
            for name, us in zip(order, times, strict=True):
                samples[name].append(us)
            for name in contestants:
                rounds[name].append(tuple(samples[name]))
        return {name: Timing(tuple(rounds[name]), one.how) for name, one in contestants.items()}

    def glance(self, one: Prepared) -> float:
        """A first idea: the median of five calls, in microseconds."""
        one.call()
        return statistics.median(self._counted([one.call] * 5))

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

    def _many(self, run: Run) -> Run:
        """As many calls, on a GPU each after a product."""

        def calls() -> Tensor:
            for number in range(self.graph_calls):
                if self._between is not None:
                    self._between(number)
                output = run()
            return output

        return calls

    def _bare_us(self, repeats: int) -> float:
        """The time of the products alone."""
        between = self._between
        if between is None:
            return 0.0
        if self._bare is None:
            with torch.cuda.device(self.device):
                self._bare = _captured(lambda: between.all(self.graph_calls))
        return statistics.median(self._times([self._bare] * repeats))

    def _counted(self, calls: Sequence[Run]) -> tuple[float, ...]:
        """Microseconds of each call, without the products."""
        others = self._bare_us(min(len(calls), self.repeats))
        return tuple((us - others) / self.graph_calls for us in self._times(calls))

    def _times(self, calls: Sequence[Run]) -> tuple[float, ...]:
        if not self.on_gpu:
            return tuple(_clocked(call) for call in calls)
        pairs = []
        with torch.cuda.device(self.device):
            for call in calls:
                self._flush()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                pairs.append((start, end))
        self.synchronize()
        return tuple(1e3 * start.elapsed_time(end) for start, end in pairs)

    def _flush(self) -> None:
        if self._buffer is None:
            return
        if self.flush == "memset":
            self._buffer.zero_()
        else:
            torch.sum(self._buffer)


class _Products:
    """Dense products that stand between the calls of a graph."""

    def __init__(self, device: torch.device) -> None:
        self._tokens, self._matrices = (
            normal(device, 0, *shape, DENSE_WIDTH).bfloat16()
            for shape in ((DENSE_TOKENS,), (DENSE_NUM, DENSE_WIDTH))
        )

    def __call__(self, number: int) -> Tensor:
        return self._tokens @ self._matrices[number % DENSE_NUM]

    def all(self, num: int) -> Tensor:
        """In a row; the last one's result."""
        return [self(number) for number in range(num)][-1]


def _clocked(call: Run) -> float:
    began = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - began)


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
