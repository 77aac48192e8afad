"""GraphPool: memory that the graphs of several layers share, and the order of their replays."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megamoe.errors import DTypeError, RangeError, require

MAX_TOKENS = 2048  # larger calls are eager: their kernels outlast the launching, and buffers grow


class GraphPool:
    """Graphs of several layers in one memory: `mm.MoE(..., cuda_graphs=pool)` for each of them.

    Between replays a graph needs its inputs and its output alone, so all other memory is that of
    the largest graph, not of their sum. Each replay follows the one before, whatever its layer and
    stream: layers that are to run side by side, such as ranks that share a process and a GPU, take
    pools of their own. A copy is a new pool.

    max_tokens  of the largest call that is replayed; larger ones are eager
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        is_int = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
        require(is_int, "max_tokens must be an integer", got=max_tokens, kind=DTypeError)
        require(
            1 <= max_tokens <= MAX_TOKENS, f"max_tokens must be 1 to {MAX_TOKENS}", got=max_tokens,
            fix="larger calls do not wait for the host", kind=RangeError,
        )  # fmt: skip
        self.max_tokens = max_tokens
        self._lanes: dict[torch.device, Lane] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphPool, (self.max_tokens,)

    def __repr__(self) -> str:
        return f"GraphPool(max_tokens={self.max_tokens})"

    def _lane(self, device: torch.device) -> Lane:
        """What the graphs on a GPU share."""
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]


class Lane:
    """On one GPU: a stream to capture on, memory, and the order of replays."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._index = device, device.index
        self.side = torch.cuda.Stream(device)
        self.lock = threading.Lock()  # of replays
        self._capturing = threading.Lock()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._memory: Any = None
        self._last = torch.cuda.current_stream(device)
        self._handle = self._last.cuda_stream

    def follow(self) -> None:
        """Let the current stream wait for the one of the call before."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)  # the stream itself takes 6 us
        if handle != self._handle:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self._last)
            self._last, self._handle = now, handle

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One capture at a time, after all replays."""
        with self._capturing:
            with self.lock:
                self.follow()
            yield

    @contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        """What is launched in the block is the graph's.

        torch takes no memory again that every graph has left, nor that of a capture that failed:
        it would be refused to all later ones.
        """
        alive = list(self._graphs)  # none of them may be collected before the new one is there
        if not alive:
            self._memory = torch.cuda.graph_pool_handle()
        now = torch.cuda.current_stream(self.device)
        try:
            # thread_local: other threads may allocate meanwhile
            with torch.cuda.graph(
                graph, self._memory, self.side, capture_error_mode="thread_local"
            ):
                yield
        except BaseException:
            self._graphs = weakref.WeakSet()
            torch.cuda.set_stream(now)  # torch may have left the side stream current
            raise
        self._graphs.add(graph)
