"""Ranks of the chain in one process, on the emulator: a thread for each."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from megamoe.engine import chain, images
from megamoe.engine.call import Call
from megamoe.engine.planning import Ranks, plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.planner import chain as planned
from megamoe.planner.overrides import checked
from megamoe.problem import Options
from tests.emulator.values import Memory

CPU = torch.device("cpu")
HOST = threading.local()  # rank of the thread that launches
REMOTE = ("exchange_kernel", "finish_kernel", "pull_kernel", "gemm_kernel", "gemm_swap_ab_kernel",
          "scales_kernel")  # fmt: skip


def let_reach(kernels, tensors):
    """Kernels that go to other ranks reach these by address alone."""
    for name in (*REMOTE, "gemm_tmem_kernel"):
        if name in kernels:
            kernels[name].hold = tensors


class ChainRanks:
    """Calls of ranks as processes make them, `most` tokens at most each."""

    def __init__(self, kernels, w, num_ranks, most, top_k, options=None, timeout_s=30.0,
                 shared=None, mode="chain", backend="hopper", **given):  # fmt: skip
        self.options, self.num, self.most, self.top_k = options or Options(), num_ranks, most, top_k
        self.timeout_s, self.shared, self.given = timeout_s, shared, given
        self.backend = backend
        if shared is not None and backend == "hopper":
            images.prepared(shared)  # once: all ranks have the same here, which no process has
        self.mode = mode
        each = w.num_experts // num_ranks
        self.weights = [w[r * each : (r + 1) * each] for r in range(num_ranks)]
        self.total = w.num_experts
        where = planned.memory(self.plan(0, 1).call, backend)
        self.memory = [torch.zeros(where.num_bytes, dtype=torch.uint8) for _ in range(num_ranks)]
        self.buffers = [chain.buffer_in(m, where) for m in self.memory]
        self.status = [DeviceStatus(CPU) for _ in range(num_ranks)]
        self.stats = [torch.zeros(each, dtype=torch.int64) for _ in range(num_ranks)]
        let_reach(kernels, self.memory)
        self.bounds = [most] * num_ranks  # that each rank plans a call for

    def plan(self, rank, num, is_quantized=False, bound=None):
        w = self.weights[rank]
        return plan_for(
            w, self.options, traits_of(self.backend, w, self.shared), num_tokens=num,
            top_k=self.top_k,
            overrides=checked({"backend": self.backend, "mode": self.mode, **self.given}),
            ranks=Ranks(self.num, self.total, max_tokens=bound or self.most),
            is_quantized=is_quantized,
        )  # fmt: skip

    def member(self, rank):
        here = self.memory[rank].data_ptr()
        peers = torch.tensor([m.data_ptr() - here for m in self.memory])
        return chain.Member(self.buffers[rank], peers, rank, self.num)

    def launch(self, rank, part):
        HOST.rank = rank
        is_quantized = not isinstance(part[0], torch.Tensor)
        plan = self.plan(rank, len(part[0]), is_quantized, self.bounds[rank])
        call = Call(
            *part, self.weights[rank], self.options, self.shared, self.status[rank],
            self.stats[rank], None, self.timeout_s,
        )  # fmt: skip
        return chain.run(self.member(rank), call, plan)

    def __call__(self, parts):
        with ThreadPoolExecutor(self.num) as pool:
            return list(pool.map(self.launch, range(self.num), parts))

    def split(self, inputs, counts):
        """Tokens of all ranks to those of each."""
        return list(zip(*(t.split(counts) for t in inputs), strict=True))


class Counted:
    """What kernels touch of other ranks' memory: bytes, and which regions."""

    def __init__(self, ranks, monkeypatch):
        self.num_bytes, self.read, self.written = 0, set(), set()
        self.regions = planned.memory(ranks.plan(0, 1).call, ranks.backend).regions
        self.begins, self.size = [m.data_ptr() for m in ranks.memory], len(ranks.memory[0])
        self.lock = threading.Lock()
        init, load, store = Memory.__init__, Memory.load, Memory.store

        def made(memory):  # by the thread of the rank that launches
            init(memory)
            memory.rank = HOST.rank

        def loaded(memory, address, dtype):
            self._count(memory, address, dtype.itemsize, self.read)
            return load(memory, address, dtype)

        def stored(memory, address, values):
            self._count(memory, address, values.dtype.itemsize, self.written)
            return store(memory, address, values)

        for name, act in (("__init__", made), ("load", loaded), ("store", stored)):
            monkeypatch.setattr(Memory, name, act)

    def _count(self, memory, address, size, names):
        for rank, begin in enumerate(self.begins):
            there = address[(address >= begin) & (address < begin + self.size)] - begin
            if rank != memory.rank and len(there):
                with self.lock:
                    self.num_bytes += size * len(there)
                    names |= {
                        r.name for r in self.regions
                        if bool(((there >= r.offset) & (there < r.end)).any())
                    }  # fmt: skip
