"""Calls of a layer as CUDA graphs: one per bucket of token counts, captured when it is first met.

A replay is one launch. The graph reads its arguments from the layer's replay_queue: where the
inputs lie and where the output goes; it copies the former into buffers of its own and the latter
out of them. The bits are those of an eager call: rows after the tokens are padding, and no bit
depends on the tile that a bucket's size chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megamoe.engine import device_guard
from megamoe.engine.call import Call
from megamoe.engine.fingerprint import LOOK_EVERY
from megamoe.engine.functional import Signature, launch
from megamoe.engine.graph_pool import GraphPool
from megamoe.engine.launch_options import LaunchOptions
from megamoe.engine.planning import plan_for, traits_of
from megamoe.engine.replay_queue import ReplayQueue, finish
from megamoe.engine.status import REPLAYS, DeviceStatus
from megamoe.engine.weights import ExpertWeights
from megamoe.formats.quantized import Quantized
from megamoe.planner.buckets import bucket_of
from megamoe.planner.copies import around
from megamoe.planner.overrides import Overrides
from megamoe.problem import Options

if TYPE_CHECKING:
    from megamoe.kernels.portable.graph_io import Inputs, ReplayArgs

MAX_SIGNATURES = 4096  # signatures of calls that are remembered


class Parts(NamedTuple):
    """What a captured call uses beside its inputs. Graphs of other objects are no good."""

    backend: str
    weights: ExpertWeights
    options: Options
    shared: ExpertWeights | None
    status: DeviceStatus
    stats: Tensor
    top_k: int
    launch_options: LaunchOptions
    overrides: Overrides

    def inputs(self, bucket: int) -> Inputs:
        """Where the graph of a bucket finds its tokens."""
        from megamoe.kernels.portable.graph_io import Inputs

        return Inputs.empty(bucket, self.weights.hidden, self.top_k, self.weights.device)

    def rehearsing(self) -> AbstractContextManager[None]:
        """Before a capture: the call is made once, on no token, so that all is compiled."""
        return nullcontext()

    def launch(self, bucket: int, inputs: Inputs) -> Tensor:
        """The call on a graph's inputs."""
        call = Call(
            inputs.x, inputs.topk_idx, inputs.topk_weights, self.weights, self.options,
            self.shared, status=self.status, stats=self.stats, num_valid=inputs.count,
            timeout_s=self.launch_options.timeout_s, is_poisoned=self.launch_options.is_poisoned,
        )  # fmt: skip
        traits = traits_of(self.backend, self.weights, self.shared, self.options.activation)
        plan = plan_for(
            self.weights, self.options, traits, num_tokens=bucket, top_k=self.top_k,
            overrides=self.overrides,
        )  # fmt: skip
        return launch(call, plan)

    def has_changed(self) -> bool:
        """Whether somebody wrote to what the experts were packed from."""
        return experts_changed(self.backend, self.weights, self.shared)

    def verify(self) -> None:
        """Refuse experts that changed, uncounted, after they were packed."""
        verify_experts(self.backend, self.weights, self.shared)


def experts_changed(backend: str, weights: ExpertWeights, shared: ExpertWeights | None) -> bool:
    """Whether somebody wrote to what a backend packed experts from."""
    if backend == "hopper":
        from megamoe.engine import images

        return images.has_changed(weights, shared)
    if backend == "blackwell":
        from megamoe.engine import derived

        return derived.has_changed(weights, shared)
    return False


def verify_experts(backend: str, weights: ExpertWeights, shared: ExpertWeights | None) -> None:
    """Refuse experts that changed, uncounted, after a backend packed them."""
    if backend == "hopper":
        from megamoe.engine import images

        images.verify(weights, shared)
    elif backend == "blackwell":
        from megamoe.engine import derived

        derived.verify(weights, shared)


class Captured:
    """One bucket: the arguments and the inputs that its graph reads, the graph, and its output."""

    def __init__(self, args: ReplayArgs, inputs: Inputs, graph: Any, y: Tensor) -> None:
        self.args, self.inputs, self.graph, self.y = args, inputs, graph, y
        self._rows: dict[int, Tensor] = {}

    def rows(self, num: int) -> Tensor:
        """The first rows of the output; views are kept, since making one takes a microsecond."""
        if num not in self._rows:
            self._rows[num] = self.y[:num]
        return self._rows[num]


class Ready(NamedTuple):
    """All that calls which look the same have in common."""

    parts: Any  # Parts, or of a group
    gpu: Gpu
    launch: Callable[[], object]
    rows: Tensor  # of the graph's own output
    words: tuple[int, int, bool]  # the last of the replay arguments


class Graphs:
    """The graphs of one layer. They share memory: calls follow each other, whatever their streams.

    most  tokens of the largest call that is served
    pool  whose memory they take, perhaps beside other layers' graphs
    """

    def __init__(self, max_tokens: int | None = None, pool: GraphPool | None = None) -> None:
        self.pool = GraphPool() if pool is None else pool
        most = self.pool.max_tokens
        self.most = most if max_tokens is None else min(max_tokens, most)
        self._captured: dict[Any, Captured] = {}
        self._by_signature: dict[Any, Ready] = {}
        self._parts: Any = None  # Parts, or of a group
        self._gpu: Gpu | None = None
        self._replays = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphs, (self.most, self.pool)  # a copy captures its own

    def serves(self, x: Tensor | Quantized) -> bool:
        """Whether a call is replayed; inside somebody else's capture it is captured there."""
        is_plain = isinstance(x, Tensor) and 0 < x.shape[0] <= self.most
        return is_plain and not torch.cuda.is_current_stream_capturing()

    def find(self, signature: Any) -> Ready | None:
        """What a call like one before needs, if it may be replayed; its parts are not compared."""
        one = self._by_signature.get(signature)
        if one is None or self._is_written() or torch.cuda.is_current_stream_capturing():
            return None
        self._replays += 1
        if self._replays % LOOK_EVERY == 0:
            one.parts.verify()
        return one

    def __call__(
        self, signature: Signature, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, parts: Parts,
        *, copy: bool = True,
    ) -> Tensor:  # fmt: skip
        """Replay a call whose inputs were checked; the next one that looks like it is found."""
        parts.status.raise_if_seen()
        one = self.ready_for(signature, bucket_of(x.shape[0], self.most), x, topk_idx, parts)
        return self.replay(one, x, topk_idx, topk_weights, copy)

    def ready_for(
        self, signature: Any, bucket: Any, x: Tensor, topk_idx: Tensor, parts: Any
    ) -> Ready:
        """What a replay of a bucket's graph needs, which is captured now if it was not before.

        signature  by which `find` finds it the next time
        """
        captured = self.captured(bucket, parts)
        assert self._gpu is not None
        words = x.stride(0), x.shape[0], topk_idx.dtype == torch.int64
        one = Ready(parts, self._gpu, captured.graph.replay, captured.rows(x.shape[0]), words)
        if len(self._by_signature) < MAX_SIGNATURES:
            self._by_signature[signature] = one
        return one

    def replay(
        self, one: Ready, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy: bool
    ) -> Tensor:
        """Replay what was found, unless an earlier call's fault has arrived.

        copy  False: the result is the graph's own, and the bucket's next call overwrites it
        """
        one.parts.status.raise_if_seen()
        return self.send(one, x, topk_idx, topk_weights, copy)

    def send(
        self, one: Ready, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, copy: bool
    ) -> Tensor:
        """Replay, whatever earlier calls found."""
        parts, gpu, launch, y, words = one
        if not device_guard.is_current(gpu.device):
            with device_guard.on(gpu.device):
                return self.send(one, x, topk_idx, topk_weights, copy)
        to = 0
        if copy:
            y = torch.empty_like(y)
            to = y.data_ptr()
        args = x.data_ptr(), topk_idx.data_ptr(), topk_weights.data_ptr(), to, *words
        try:
            with gpu.lane.lock:  # another thread's launch would take these arguments
                gpu.lane.follow()
                gpu.replay_queue.send(args, launch)
        except BaseException:
            self.drop()
            raise
        parts.status.copy_to_host_async(parts.top_k, every=REPLAYS)
        return y

    def prepare(self, num_tokens: int, parts: Parts) -> Captured:
        """The graph that serves so many tokens, captured now if it was not before."""
        return self.captured(bucket_of(num_tokens, self.most), parts)

    def captured(self, bucket: Any, parts: Any) -> Captured:
        """The graph of a bucket, captured now if it was not before."""
        if self._parts is None or not all(map(is_, parts, self._parts)) or self._is_written():
            self.drop()
            self._gpu = Gpu(parts.weights.device, self.pool)
            self._parts = parts
        if bucket not in self._captured:
            with device_guard.on(parts.weights.device):
                self._captured[bucket] = self._gpu.capture(bucket, parts)  # type: ignore[union-attr]
        return self._captured[bucket]

    def _is_written(self) -> bool:
        """Whether somebody wrote to what the experts were packed from."""
        return self._parts is not None and self._parts.has_changed()

    def drop(self) -> None:
        """Let all graphs go, once the GPU is done with them."""
        gpu, captured = self._gpu, self._captured
        self._captured, self._by_signature = {}, {}
        self._parts, self._gpu = None, None
        if gpu is not None:
            finish(gpu.device)
        captured.clear()


class Gpu:
    """What a layer's graphs need of a GPU: their lane, and the arguments of replays.

    One replay_queue for all of a layer's graphs: whichever is replayed takes the next arguments.
    """

    def __init__(self, device: torch.device, pool: GraphPool) -> None:
        self.device, self.lane = device, pool._lane(device)
        with torch.inference_mode(False):
            self.replay_queue = ReplayQueue(device)
            self._empty = ReplayQueue(device)  # for calls that only warm up

    def capture(self, bucket: Any, parts: Any) -> Captured:
        """Rehearse the call, so that all is compiled and packed; then capture it."""
        side = self.lane.side
        with self.lane.alone(), torch.inference_mode(False), torch.no_grad():
            inputs = parts.inputs(bucket)
            now = torch.cuda.current_stream(self.device)
            side.wait_stream(now)
            with torch.cuda.stream(side), parts.rehearsing():
                inputs.count.zero_()
                _launch_all(parts, bucket, inputs, self._empty.args)
            now.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with self.lane.capture(graph):
                y = _launch_all(parts, bucket, inputs, self.replay_queue.args)
        return Captured(self.replay_queue.args, inputs, graph, y)


def _launch_all(parts: Any, bucket: Any, inputs: Inputs, args: ReplayArgs) -> Tensor:
    """One call of a graph: its inputs in, the layer's launches, its output out."""
    from megamoe.kernels.portable.graph_io import copy_inputs, copy_output, read_args

    steps = around(*inputs.x.shape, inputs.topk_idx.shape[1])
    read_args(args, steps.read_args)
    copy_inputs(args.now, inputs, steps.copy_inputs)
    y: Tensor = parts.launch(bucket, inputs)
    copy_output(args.now, y, steps.copy_output)
    return y
