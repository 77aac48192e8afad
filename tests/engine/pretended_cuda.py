"""A CUDA without a GPU, as graphs see it: streams, events, captures, the kernels around a call."""

import ctypes
import types
from contextlib import contextmanager
from dataclasses import replace

import torch

from megamoe import reference
from megamoe.engine import graphs, layer, planning
from megamoe.engine.functional import run
from megamoe.kernels.portable import graph_io
from megamoe.routing.permute import expert_counts
from tests.engine.pretended import E, H, K
from tests.pretending import pretend_h200


class Cuda:
    """Stands for the GPU: a captured call is kept, and made when its graph is replayed.

    queue  replays and what is to be done behind them, where the GPU is late; None: it is not
    """

    def __init__(self):
        self.log, self.capturing, self.busy, self.now = [], None, False, "main"
        self.queue, self.streams = None, {}
        self.spoils_capture, self._recording = False, set()  # pools whose capture did not end

    def stream(self, name):
        def wait(other):
            self.log.append(f"{name} waits for {other.name}")

        return types.SimpleNamespace(name=name, wait_stream=wait, cuda_stream=hash(name))

    def current_stream(self, device):
        return self.streams.setdefault(self.now, self.stream(self.now))

    @contextmanager
    def on_stream(self, stream):
        self.log.append(f"on {stream.name}")
        yield

    @contextmanager
    def capture(self, graph, pool, stream, capture_error_mode):
        if pool in self._recording:
            raise RuntimeError(f"already recording to {pool}")
        self.log.append(f"capture on {stream.name} in {pool}")
        self.capturing = graph
        yield
        self.capturing = None
        if self.spoils_capture:
            self._recording.add(pool)
            raise RuntimeError("the capture was invalidated")

    def catch_up(self, until=None):
        while self.queue:
            step = self.queue.pop(0)
            if step is until:
                return
            if isinstance(step, Graph):
                step.run()

    def do(self, call):
        if self.capturing is None:
            call()
        else:
            self.capturing.calls.append(call)

    def launch(self, given, plan):
        """`functional.launch` with the oracle's arithmetic, now or at the replay."""
        x, idx, weights, experts, options, shared, status, stats, num, *_ = given
        y = torch.full_like(x, float("nan"))

        def call():
            bad = (idx < -1) | (idx >= E) | ((idx >= 0) & ~weights.isfinite())
            bad &= torch.arange(len(x))[:, None] < num
            if bad.any():
                status.bad_slot.fill_(int(bad.flatten().nonzero()[0]))
            legal = idx.masked_fill(bad | (torch.arange(len(x))[:, None] >= num), -1)
            y.copy_(reference.moe(x, legal, weights, experts, options, shared))
            stats.add_(expert_counts(legal, E))
            status.copy_to_host_async(K)

        if self.capturing is None:
            self.log.append(f"launch {len(x)}")
        self.do(call)
        return y

    # -- the kernels around a call, on real addresses ------------------------------------------

    def read_args(self, args, step):
        def call():
            at = int(args.next_slot)
            args.now.copy_(args.slots[at])
            args.next_slot.fill_((at + 1) % len(args.slots))

        self.do(call)

    def copy_inputs(self, now, into, step):
        def call():
            x, idx, weights, _, stride, num, is_long, _ = now.tolist()
            into.count.fill_(num)
            if num:
                rows = lying_at(x, torch.bfloat16, (num - 1) * stride + H)
                into.x[:num] = rows.as_strided((num, H), (stride, 1))
                ids = lying_at(idx, torch.int64 if is_long else torch.int32, num * K)
                into.topk_idx[:num] = ids.view(num, K)
                into.topk_weights[:num] = lying_at(weights, torch.float32, num * K).view(num, K)

        self.do(call)

    def copy_output(self, now, y, step):
        def call():
            _, _, _, to, _, num, _, _ = now.tolist()
            if to:
                lying_at(to, torch.bfloat16, num * H).copy_(y[:num].flatten())

        self.do(call)


def lying_at(address, dtype, num):
    raw = (ctypes.c_char * (num * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)


class Graph:
    def __init__(self, gpu):
        self.gpu, self.calls, self.fails = gpu, [], False

    def replay(self):
        if self.fails:
            raise KeyboardInterrupt
        if self.gpu.queue is None:
            self.run()
        else:
            self.gpu.queue.append(self)

    def run(self):
        for call in self.calls:
            call()


class Event:
    def __init__(self, gpu):
        self.gpu, self.is_new = gpu, True

    def record(self, stream):
        self.is_new, self.mark = False, object()
        self.gpu.log.append(f"record on {stream.name}")
        if self.gpu.queue is not None:
            self.gpu.queue.append(self.mark)

    def synchronize(self):
        if not self.is_new:
            self.gpu.log.append("wait")
            if self.gpu.queue and self.mark in self.gpu.queue:
                self.gpu.catch_up(self.mark)


def install(monkeypatch):
    """Have the engine use it."""
    fake = Cuda()
    there = {
        "Stream": lambda device: fake.stream("side"),
        "Event": lambda: Event(fake),
        "current_stream": fake.current_stream,
        "set_stream": lambda stream: fake.log.append(f"back on {stream.name}"),
        "stream": fake.on_stream,
        "graph": fake.capture,
        "CUDAGraph": lambda: Graph(fake),
        "graph_pool_handle": lambda: f"pool {len(fake.log)}",
        "is_current_stream_capturing": lambda: fake.busy,
        "synchronize": lambda device: fake.log.append("synchronize"),
    }
    for name, one in there.items():
        monkeypatch.setattr(torch.cuda, name, one)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: hash(fake.now), raising=False
    )
    monkeypatch.setattr(graphs, "launch", fake.launch)
    for name in ("read_args", "copy_inputs", "copy_output"):
        monkeypatch.setattr(graph_io, name, getattr(fake, name))
    monkeypatch.setattr(layer, "choose", lambda *wanted: ("portable", planning.Traits(), ""))
    pretend_h200(monkeypatch)

    def eager(call, plan):
        fake.log.append("eager")
        return run(call, replace(plan, backend="reference"))

    monkeypatch.setattr(layer, "run", eager)
    return fake
