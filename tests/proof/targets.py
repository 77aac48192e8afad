"""The kernels that are scheduled, and the launches that are made of them: all names are here.

A `Case` is some launches as the engine makes them, with all memory that they reach as it was before
the first. A run puts that back, launches them under a scheduler, and holds all memory to what the
run without preemption left.
"""

import contextlib
import ctypes
import functools
from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe.engine import backends, chain, fused, hopper, symm_buffer
from megamoe.engine.call import Call
from megamoe.engine.local import LocalRanks
from megamoe.engine.planning import Ranks
from megamoe.engine.status import DeviceStatus
from megamoe.kernels.blackwell import launch as blackwell_launch
from megamoe.kernels.blackwell.mega import launch as mega_tmem_launch
from megamoe.kernels.gluon import (
    dispatch,
    exchange,
    l2_policy,
    operands,
    permute,
    pipeline,
    pull,
    tile_scheduler,
)
from megamoe.kernels.gluon.mega import begin, combine, inbox, push, scheduler, state, sync
from megamoe.kernels.gluon.mega import dispatch as mega_dispatch
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.gemm import (
    decode_per_tile,
    decode_per_wave,
    epilogue,
    follow,
    plain,
    swap_ab,
)
from megamoe.kernels.hopper.mega import kernel, smem
from megamoe.kernels.hopper.mega import launch as mega_launch
from megamoe.kernels.hopper.weights import decode
from megamoe.kernels.portable import combine as portable_combine
from megamoe.kernels.portable import dispatch as portable_dispatch
from megamoe.kernels.portable import sort
from megamoe.planner import chain as planned
from megamoe.planner.hopper import exchange_of, num_rows, ring, weights_ahead
from megamoe.planner.launches import Gemm, GemmSwapAb
from megamoe.problem import Options
from megamoe.routing.samplers import sample_routing
from tests.emulator import device, policies, tensor_memory
from tests.emulator.device import Scheduled, rewrite, synchronize
from tests.emulator.memory_model import Violation
from tests.emulator.running import Emulated
from tests.emulator.scheduler import Scheduler
from tests.pretending import plan_of, pretend_h200

CPU = torch.device("cpu")
# What is mutated: every file that synchronises roles, CTAs or launches of a Gluon kernel.
MODULES = (
    pipeline, l2_policy, operands, swap_ab, epilogue, decode, sync, mega_dispatch, push, inbox,
    scheduler, state, begin, smem, kernel, combine, plain, tile_scheduler, decode_per_tile,
    decode_per_wave, follow, pull,
)  # fmt: skip
# Functions that give PTX that waits, and with what.
TEXTS = (
    *((pipeline, "wait_text", how) for how in (("gpu", "eq"), ("sys", "ge"), ("gpu", "ge"))),
    *((sync, "signal_text", (scope,)) for scope in ("gpu", "sys")),
)
_AT = {"mega": (mega_launch, "mega_kernel"), "swap_ab": (launch, "gemm_swap_ab_kernel"),
       "plain": (launch, "gemm_kernel"), "pull": (pull, "pull_kernel"),
       "exchange": (exchange, "exchange_kernel"), "finish": (exchange, "finish_kernel"),
       "tmem": (blackwell_launch, "gemm_tmem_kernel"),
       "mega-tmem": (mega_tmem_launch, "mega_tmem_kernel")}  # fmt: skip
_GLUON = {name: getattr(*at) for name, at in _AT.items()}
# Arguments of staged launches that others fill before them, and again after them.
OTHERS = ("x", "x_scale", "row_weight", "row_dest", "tiles", "num_tiles", "items")
_PLAIN = (
    (dispatch, "_pool_kernel"), (permute, "_count_kernel"), (permute, "_place_kernel"),
    (sort, "_scan_kernel"), (tile_scheduler, "_schedule_kernel"),
    (portable_combine, "_combine_kernel"), (portable_dispatch, "_dispatch_kernel"),
    (exchange, "_quantize_kernel"), (pull, "_rows_kernel"),
)  # fmt: skip


@functools.cache
def kernels():
    """The kernels under a scheduler, by name. L2 is always warm: windows hold all weights."""
    tensor_memory.install()
    made = {name: Scheduled(kernel, name) for name, kernel in _GLUON.items()}
    for module in device.MODULES.values():
        if "L2_WARM_BYTES" in module:
            module["L2_WARM_BYTES"] = 0
    return made


def _reasons(device):
    """Hopper runs here."""
    return {b.name: "" if b.name in ("hopper", "reference") else "no" for b in backends.BACKENDS}


@contextlib.contextmanager
def installed(num_sms, gluon):
    """The engine launches `gluon` kernels by name here, and others as they are emulated."""
    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in gluon.items():
            patch.setattr(*_AT[name], kernel)
        for module, name in _PLAIN:
            patch.setattr(module, name, Emulated(getattr(module, name)))
        pretend_h200(patch, num_sms)
        patch.setattr(backends, "reasons_on", _reasons)
        yield patch


# -- launches as they were made --------------------------------------------------------------------


class Recorder:
    """Stands for a kernel, and keeps what it was launched with."""

    def __init__(self, name, kept):
        self.name, self.kept = name, kept

    def __getitem__(self, grid):
        def keep(**given):
            self.kept.append((self.name, grid, given))

        return keep


def _storages(values):
    for value in values:
        t = getattr(value, "base", value)  # of a TMA descriptor
        if isinstance(t, torch.Tensor):
            yield t.untyped_storage()


def _bytes(storage):
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


class Case:
    """Launches of one host, replayed.

    used  rows of the result that a launch must have written; None: all
    """

    def __init__(self, name, launches, held=(), is_early=False, is_strict=True, used=None):
        self.name, self.launches, self.held = name, launches, list(held)
        self.is_early, self.is_strict, self.used = is_early, is_strict, used
        storages = {}
        for _, _, given in launches:
            for storage in _storages((*given.values(), *held)):
                storages[storage.data_ptr()] = storage
        self.before = {at: (s, _bytes(s)) for at, s in storages.items() if s.nbytes()}
        self.wanted = None

    def _reset(self):
        for at, (storage, data) in self.before.items():
            ctypes.memmove(at, data, storage.nbytes())

    def _neighbours(self):
        """What launches before fill and launches after reuse, where launches overlap."""
        found = {}
        for name, _, given in self.launches:
            for each in OTHERS:
                t = getattr(given.get(each), "base", given.get(each))
                if isinstance(t, torch.Tensor) and t.is_contiguous():
                    found.setdefault(t.data_ptr(), (f"{name}'s {each}", t))
        return dict(found.values())

    def _host(self):
        known = kernels()
        if self.is_early:
            rewrite(self._neighbours(), "the launch before")
        for name, grid, given in self.launches:
            known[name].hold = self.held
            known[name][grid](**{**given, "launch_pdl": self.is_early})
        if self.is_early:
            rewrite(self._neighbours(), "the launch after")
        synchronize()

    def run(self, policy, log=None):
        """One interleaving; raises `Violation`, or what the kernel raised."""
        self._reset()
        scheduler = Scheduler(policy)
        scheduler.log, scheduler.memory.is_strict = log, self.is_strict
        scheduler.run(self._host)
        after = {at: _bytes(storage) for at, (storage, _) in self.before.items()}
        if self.wanted is None:
            self.wanted = after
        for at, data in after.items():
            if data != self.wanted[at]:
                pairs = zip(data, self.wanted[at], strict=True)
                first = next(i for i, (a, b) in enumerate(pairs) if a != b)
                name = scheduler.memory.region(at, 1).name
                raise Violation(f"another result: {name}[byte {first}]")
        return scheduler

    def learn(self):
        """What a run without preemption leaves; none of it is poison."""
        self.wanted = None
        scheduler = self.run(policies.Calm())
        name, _, given = self.launches[-1]
        result = given["y" if name.startswith("mega") else "out"]
        result = result if self.used is None else result[self.used]
        assert not self.is_strict or bool(result.isfinite().all()), "poison in the result"
        return scheduler


class Live:
    """Hosts that call the engine while the scheduler runs; `make()` -> (hosts, check)."""

    def __init__(self, name, make, num_sms, agents=900, is_strict=True, kernels=("mega",)):
        self.name, self.make, self.num_sms, self.agents = name, make, num_sms, agents
        self.is_strict, self.kernels = is_strict, kernels

    def run(self, policy, log=None):
        hosts, check = self.make()
        scheduler = Scheduler(policy, agents=self.agents)
        scheduler.log, scheduler.memory.is_strict = log, self.is_strict
        with installed(self.num_sms, {name: kernels()[name] for name in self.kernels}):
            scheduler.run(*hosts)
        check()
        return scheduler

    def learn(self):
        return self.run(policies.Calm())


# -- layers ----------------------------------------------------------------------------------------


@functools.cache
def weights_of(recipe, num, hidden, intermediate, has_bias=False):
    rng = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=rng)

    w13 = (normal(num, 2 * intermediate, hidden) / hidden**0.5).bfloat16()
    w2 = (normal(num, hidden, intermediate) / intermediate**0.5).bfloat16()
    bias = {"b13": normal(num, 2 * intermediate) / 4, "b2": normal(num, hidden) / 4}
    return mm.ExpertWeights.quantize(w13, w2, recipe, **(bias if has_bias else {}))


def tokens_of(num, experts, hidden, top_k=2, seed=0, **routing):
    x = torch.randn(num, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, *sample_routing(num, experts, top_k, seed=seed, **routing)


def few_stages(tile, stages=3, window=0):
    """A tile whose ring goes round several times even here."""
    if isinstance(tile, Gemm):
        return replace(tile, num_stages=min(tile.num_stages, stages))
    return replace(tile, num_stages=stages, k_blocks=1, max_in_flight=window)


def few_stages_fused(step, **how):
    """A fused launch with such a tile."""
    tile = few_stages(step.config.tile, **how)
    config = replace(step.config, tile=tile, weights_ahead=weights_ahead(tile))
    return replace(step, config=config)


@functools.cache
def fused_case(recipe="w8a8", num_sms=2, tokens=3, experts=2, pool_rows=None, window=0, stages=3,
               has_bias=False, hidden=256, intermediate=256, top_k=2, absent=-1, poison=None,
               has_bad_slot=False):  # fmt: skip
    """One rank."""
    kept = []
    w = weights_of(recipe, experts, hidden, intermediate, has_bias)
    inputs = tokens_of(tokens, experts, hidden, top_k)
    if has_bad_slot:
        inputs[1][-1, -1] = experts
    status, stats = DeviceStatus(CPU), torch.zeros(experts, dtype=torch.int64)
    if poison is not None:
        status.counters.view(-1)[poison[0]] = poison[1]
    rows, wave_rows = ring(num_rows(inputs[1].numel(), experts), pool_rows, 8)
    with installed(num_sms, {"mega": Recorder("mega", kept)}):
        step = few_stages_fused(plan_of(inputs, w, mode="fused").mega, stages=stages, window=window)
        config = replace(
            step.config, tile=replace(step.config.tile, block_m=8), pool_rows=rows,
            wave_rows=wave_rows,
        )  # fmt: skip
        call = Call(*inputs, w, Options(), None, status, stats, None, 30.0, True)
        fused.run(call, replace(step, config=config), absent=absent)
    return Case("fused", kept)


@functools.cache
def local_case(recipe="w8a8", ranks=2, ctas=2, counts=(2, 1), experts=4, hidden=256,
               intermediate=256):  # fmt: skip
    """Several ranks of one launch."""
    kept = []
    w = weights_of(recipe, experts, hidden, intermediate)
    inputs = tokens_of(sum(counts), experts, hidden)
    with installed(ranks * ctas, {"mega": Recorder("mega", kept)}):
        there = LocalRanks(w, ranks, timeout_s=30.0, debug_poison=True)
        there._top_k = 2
        there._make_buffers(max(counts))
        found = there.plan(max(counts), 2)
        there.plan = lambda *_: replace(found, mega=few_stages_fused(found.mega))
        there(*(t.split(counts) for t in inputs))
    most = max(counts)  # of a rank; what follows its tokens is padding
    used = [rank * most + i for rank, count in enumerate(counts) for i in range(count)]
    return Case("fused-ranks", kept, [buffer.tokens for buffer in there._buffers], used=used)


def apart_case(recipe="w8a8", ranks=2, ctas=1, calls=((2, 1), (1, 2)), experts=2, hidden=256,
               intermediate=128, absent=None):  # fmt: skip
    """Ranks as launches of their own, several calls of each, one after another.

    absent  a rank that makes no call
    """
    w = weights_of(recipe, experts, hidden, intermediate)
    most, per_rank = max(map(max, calls)), experts // ranks
    parts = [w[r * per_rank : (r + 1) * per_rank] for r in range(ranks)]
    inputs = [tokens_of(sum(counts), experts, hidden, seed=i) for i, counts in enumerate(calls)]
    given = [[t.split(counts) for t in one] for one, counts in zip(inputs, calls, strict=True)]
    with installed(ctas, {}):
        of_ranks = Ranks(ranks, experts, max_tokens=most)
        some = tokens_of(most, experts, hidden)
        found = plan_of(some, parts[0], mode="fused", ranks=of_ranks)
    assert found.num_passes == 1
    step, where = few_stages_fused(found.mega), exchange_of(found.call)
    wanted = []

    def make():
        memory = [torch.zeros(where.num_bytes, dtype=torch.uint8) for _ in range(ranks)]
        there = [symm_buffer.symm_buffer_in(m, where) for m in memory]
        status = [DeviceStatus(CPU) for _ in range(ranks)]
        results = [[] for _ in range(ranks)]
        kernels()["mega"].hold = memory

        def host(rank):
            peers = torch.tensor([m.data_ptr() - memory[rank].data_ptr() for m in memory])
            world = mega_launch.World(ranks, 1, rank, peers, there[rank].signals, there[rank].inbox)
            stats = torch.zeros(per_rank, dtype=torch.int64)
            for number, one in enumerate(given):
                there[rank].put(*(t[rank] for t in one))
                y = fused.over(
                    there[rank], most, parts[rank], Options(), world, stats, step=step,
                    status=status[rank], timeout_s=30.0, is_poisoned=True,
                )  # fmt: skip
                results[rank].append(y[: calls[number][rank]])

        def check():
            for rank in range(ranks):
                if rank != absent:
                    status[rank].check(2)
                assert not there[rank].counters.any(), "counters are not zero"
            got = [torch.cat(each) for each in zip(*results, strict=True)]
            if not wanted:
                wanted.extend(got)
            for a, b in zip(got, wanted, strict=True):
                if not torch.equal(a, b):
                    raise Violation("another result")

        present = [rank for rank in range(ranks) if rank != absent]
        hosts = [functools.partial(host, rank) for rank in present]
        return hosts, check

    return Live("fused-apart", make, ctas, is_strict=absent is None)


class ChainMembers:
    """Ranks of a chain: their experts, plans and memory."""

    def __init__(self, w, ranks, most, top_k, tile):
        self.num, self.most, self.top_k, self.tile = ranks, most, top_k, tile
        self.total = w.num_experts
        each = w.num_experts // ranks
        self.weights = [w[r * each : (r + 1) * each] for r in range(ranks)]

    def plan(self, inputs, rank):
        """With the tile of a proof in both linears, of few stages."""
        given = {"overlap_launches": False}
        if isinstance(self.tile, Gemm):
            given |= {"kernel": "gemm", "schedule": self.tile.schedule}
            if self.tile.decode_ahead:
                given |= {"decode_ahead": self.tile.decode_ahead}
        of_ranks = Ranks(self.num, self.total, max_tokens=self.most)
        found = plan_of(inputs, self.weights[rank], mode="chain", ranks=of_ranks, **given)
        source, *owner = found.passes
        passes = [source, *(self._with_few_stages(one) for one in owner)]
        return replace(found, passes=tuple(passes))

    def _with_few_stages(self, one):
        def few(step):
            if step.name not in ("l1", "l2"):
                return step
            return replace(step, config=few_stages(step.config, self.tile.num_stages))

        return replace(one, launches=tuple(few(step) for step in one.launches))

    def make(self, call):
        """(memory of each rank, its member)."""
        where = planned.memory(call)
        memory = [torch.zeros(where.num_bytes, dtype=torch.uint8) for _ in range(self.num)]
        made = []
        for rank, own in enumerate(memory):
            peers = torch.tensor([m.data_ptr() - own.data_ptr() for m in memory])
            made.append(chain.Member(chain.buffer_in(own, where), peers, rank, self.num))
        return memory, made


@functools.cache
def chain_case(recipe, tile, counts=(5, 3), num_sms=2, hidden=256, intermediate=256):
    """Pull, L1 and L2 of one rank's chain, each of which follows the one before tile by tile."""
    kept = []
    w = weights_of(recipe, len(counts), hidden, intermediate)
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))]
    x, _, gates = tokens_of(len(slots), len(counts), hidden, 1)
    inputs = x, slots.view(-1, 1), gates
    ranks = ChainMembers(w, 1, len(slots), 1, tile)
    free = {name: Emulated(_GLUON[name]) for name in ("exchange", "finish")}
    both = {name: Recorder(name, kept) for name in ("pull", "swap_ab", "plain")}
    with installed(num_sms, {**both, **free}):
        memory, (me,) = ranks.make(ranks.plan(inputs, 0).call)
        for kernel in free.values():
            kernel.hold = memory
        call = Call(*inputs, w, Options(), None, DeviceStatus(CPU))
        chain.run(me, call, ranks.plan(inputs, 0))
    assert len(kept) == 3 and kept[0][0] == "pull"
    return Case("chain", kept, memory, is_early=True)


def chain_apart_case(recipe="w8a8", ranks=2, calls=((2, 1), (1, 2)), experts=2, hidden=256,
                     intermediate=128, absent=None):  # fmt: skip
    """Ranks of a chain, several calls of each: what is pushed, pulled and sent home."""
    w = weights_of(recipe, experts, hidden, intermediate)
    inputs = [tokens_of(sum(counts), experts, hidden, seed=i) for i, counts in enumerate(calls)]
    given = [list(zip(*(t.split(counts) for t in one), strict=True))
             for one, counts in zip(inputs, calls, strict=True)]  # fmt: skip
    there = ChainMembers(w, ranks, max(map(max, calls)), 2, WIDE)
    with installed(2, {}):
        plans = [[there.plan(parts[r], r) for r in range(ranks)] for parts in given]
    wanted = []

    def make():
        memory, members = there.make(plans[0][0].call)
        status = [DeviceStatus(CPU) for _ in range(ranks)]
        results = [[] for _ in range(ranks)]
        for name in ("exchange", "finish", "pull", "swap_ab"):
            kernels()[name].hold = memory

        def host(rank):
            for parts, planned_call in zip(given, plans, strict=True):
                call = Call(*parts[rank], there.weights[rank], Options(), None, status[rank])
                results[rank].append(chain.run(members[rank], call, planned_call[rank]))

        def check():
            for rank in range(ranks):
                if rank != absent:
                    status[rank].check(2)
            got = [torch.cat(each) for each in zip(*results, strict=True)]
            if not wanted:
                wanted.extend(got)
            for a, b in zip(got, wanted, strict=True):
                if not torch.equal(a, b):
                    raise Violation("another result")

        present = [rank for rank in range(ranks) if rank != absent]
        return [functools.partial(host, rank) for rank in present], check

    names = "exchange", "finish", "pull", "swap_ab"
    return Live("chain-apart", make, 2, is_strict=absent is None, kernels=names)


def staged_plan(inputs, w, tile):
    """The plan of a staged call with that tile, whose launches do not overlap."""
    found = plan_of(inputs, w, mode="staged", tile=tile, overlap_launches=False)
    assert not found.overlaps
    return found


@functools.cache
def staged_case(recipe, tile, counts=(5, 3), num_sms=2, hidden=256, intermediate=256, stages=3,
                has_bias=False, is_early=True):  # fmt: skip
    """L1 and L2 of a staged call, experts with so many rows each."""
    kept = []
    w = weights_of(recipe, len(counts), hidden, intermediate, has_bias)
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))]
    x, _, gates = tokens_of(len(slots), len(counts), hidden, 1)
    inputs = x, slots.view(-1, 1), gates
    both = {name: Recorder(name, kept) for name in ("swap_ab", "plain")}
    with installed(num_sms, both):
        plan = staged_plan(inputs, w, few_stages(tile, stages))
        hopper.run(Call(*inputs, w, Options(), None, DeviceStatus(CPU)), plan)
    return Case("staged", kept, is_early=is_early)


SLAB = GemmSwapAb(block_m=8, slabs=1, k_blocks=1, num_stages=3)
WIDE = GemmSwapAb(block_m=64, slabs=2, k_blocks=1, num_stages=3)  # rows turn in shared memory
NARROW = GemmSwapAb(block_m=8, slabs=2, k_blocks=1, num_stages=3)
PLAIN = Gemm(3)
STATIC = Gemm(3, schedule="static")
DYNAMIC = Gemm(3, schedule="dynamic")
PER_TILE = Gemm(2, 2, 8, 216, 56, 24)
PER_WAVE = Gemm(2, 2, 24, 216, 56, 24, decode_ahead=4)

# -- mutants that change nothing -------------------------------------------------------------------

_FENCED = "a fence of the async proxy stands elsewhere on the same way, and PTX asks for one"
_BARRED = "the compiler puts a barrier of the role's threads before every arrival (`compiled`)"
_FREE = "plain Triton kernels run freely here, one after the other"
_PACE = "speed alone: it holds back who would otherwise only be early"
# {mutant: why no run can tell it from the kernel}. Where one of several suffices, `TOGETHER` drops
# all of them.
EXCUSED = {
    "gluon.operands.publish_operands: no gl.thread_barrier()": _BARRED,
    "gluon.operands.publish_operands: mbarrier.arrive(gemm.epilogue.full, count=1) before "
    "gl.thread_barrier()": _BARRED,
    "gluon.operands.post_tile: no gl.thread_barrier()": _BARRED,
    "mega.dispatch.read_routing: no gl.thread_barrier()": _BARRED,
    "mega.dispatch.read_routing: mbarrier.arrive(cta.routed, count=1) before "
    "gl.thread_barrier()": _BARRED,
    "mega.kernel._arrive_stored: no gl.thread_barrier()": _BARRED,
    "mega.kernel._arrive_stored: mbarrier.arrive(cta.tile_stored.index(num_stored & 1), count=1) "
    "before gl.thread_barrier()": _BARRED,
    "gemm.plain._compute: no gl.thread_barrier()": _BARRED,
    "gemm.decode_per_wave.decode_jobs: no gl.thread_barrier()": _BARRED,
    "gemm.decode_per_wave.decode_jobs: mbarrier.arrive(d.stored.index(slot.idx), count=1) before "
    "gl.thread_barrier()": _BARRED,
    "mega.kernel.mega_kernel: no gl.thread_barrier()": "entering warp_specialize is such a barrier",
    "mega.sync.publish_count: no fence_stores()": _FENCED,
    "mega.kernel.publish: no fence_stores()": _FENCED,
    "mega.kernel._arrive_stored: no fence_stores()": _FENCED,
    "gemm.plain._compute: no fence_stores()": _FENCED,
    "gluon.tile_scheduler.publish_l1_tile: no fence_stores()": _FENCED,
    "gluon.tile_scheduler.publish_l1_tile: gl.atomic_add(counter, 1, sem='release', scope='gpu') "
    "before fence_stores()": _FENCED,
    "gluon.pipeline.wait_text(gpu, eq): has no proxy fence": _FENCED,
    "gemm.swap_ab.finish: no fence_stores()": _FENCED,
    "gemm.swap_ab.finish: no gl.thread_barrier()": _BARRED,
    "gluon.pull.pull_kernel: no fence_stores()": _FENCED,
    "gluon.pull.pull_kernel: no allow_next_launch()": _PACE,
    "gluon.pull._rows_kernel: no after_previous()": _FREE,
    "gluon.pipeline.wait_text(sys, ge): has no proxy fence":
        "no copy by TMA reads what another GPU stored",
    "gemm.swap_ab.load_weight_step: no _throttle(gemm, stage)": _PACE,
    "gemm.swap_ab._throttle: no mbarrier.wait(gemm.full.index(at), gl.where(wraps, stage.phase, "
    "stage.phase ^ 1))": _PACE,
    "gemm.swap_ab.gemm_swap_ab_kernel: no allow_next_launch()": _PACE,
    "gemm.plain.gemm_kernel: no allow_next_launch()": _PACE,
    "mega.dispatch.fill_pool: mbarrier.arrive(cta.own_filled, count=1) before "
    "_fill_parts(cta, begin, end, 0, 2, cta.counters + POOL)": _PACE,
    "mega.kernel.load_weights: no mbarrier.wait(cta.own_filled, 0)": _PACE,
    "mega.kernel.load_weights: no mbarrier.wait(cta.pool_filled, 0)": _PACE,
    "mega.kernel.math: no mbarrier.wait(l1.full.index(stage.idx), stage.phase)":
        "the product waits for it again",
    "mega.kernel.math: no mbarrier.wait(cta.all_done, 0)": "in builds with stamps alone",
    "mega.kernel.math: other phase of mbarrier.wait(cta.all_done, 0)":
        "in builds with stamps alone",
    "gemm.swap_ab.load_epilogue_operands: no wait_for_launch()":
        "it reads what is older than L1, and L1 lets L2 begin once that is complete",
    "gemm.swap_ab.math: no wait_for_launch()":
        "its first stage comes from load_tokens, which has waited",
    "gemm.plain.math: no wait_for_launch()":
        "its first stage comes from load_tokens, which has waited",
    "mega.scheduler._push: no mbarrier.wait(cta.item_empty.index(slot), i >> 1 & 1 ^ 1)":
        "_wait_until_popped has waited for the item after the one that is replaced",
    "mega.scheduler.schedule_tiles: no _wait_until_popped(cta, i)":
        "_push waits too; tickets are taken earlier, which costs time",
    "mega.scheduler._wait_until_popped: no mbarrier.wait(cta.item_empty.index(i & 1), i >> 1 & 1)":
        "_push waits too; tickets are taken earlier, which costs time",
    "mega.kernel._arrive_stored: no mbarrier.wait(cta.tile_counted.index(num_stored & 1), "
    "num_stored >> 1 & 1 ^ 1)":
        "operands of the next tile come once publish has counted this one: math is one tile ahead "
        "at most, and there are two slots",
    "gemm.plain._compute: no wait_for_operands(gemm, num_done)":
        "the warp that brings operands has them before it brings the last stage",
    "gemm.decode_per_tile.decode: mbarrier.arrive(gemm.image_empty.index(used), count=1) before "
    "mbarrier.arrive(gemm.full.index(stage.idx), count=1)": "two arrivals after the same fence",
    "gemm.decode_per_wave.decode_jobs: mbarrier.arrive(d.free.index(slot.idx), count=1) before "
    "mbarrier.arrive(d.stored.index(slot.idx), count=1)":
        "free needs publish_jobs as well, which waits for stored",
    "gemm.decode_per_wave.publish_rest: release is relaxed in gl.atomic_add("
    "_chunk_counter(gemm, chunk), 1, sem='release', scope='gpu')":
        "of chunks that the CTA has not read: it has nothing to publish",
    "gemm.decode_per_wave.publish_jobs: mbarrier.arrive(d.free.index(slot.idx), count=1) before "
    "gl.atomic_xchg(counter, value, sem='release', scope='gpu')": "the slot has been read",
}  # fmt: skip

# Mutants that only together take something away.
TOGETHER = {
    "no proxy fence between a fused launch's stores and copies": (
        "mega.sync.publish_count: no fence_stores()", "mega.kernel.publish: no fence_stores()",
        "mega.kernel._arrive_stored: no fence_stores()",
        "gluon.pipeline.wait_text(gpu, eq): has no proxy fence",
    ),
    "no proxy fence between L1's stores and L2's copies": (
        "gemm.plain._compute: no fence_stores()",
        "gluon.tile_scheduler.publish_l1_tile: no fence_stores()",
        "gluon.pipeline.wait_text(gpu, ge): has no proxy fence",
    ),
    "no proxy fence between the stores of a pull and L1's copies": (
        "gluon.pull.pull_kernel: no fence_stores()",
        "gluon.pipeline.wait_text(gpu, ge): has no proxy fence",
    ),
    "work items replaced unread": (
        "mega.scheduler._push: no mbarrier.wait(cta.item_empty.index(slot), i >> 1 & 1 ^ 1)",
        "mega.scheduler.schedule_tiles: no _wait_until_popped(cta, i)",
    ),
}  # fmt: skip
# The race that once shipped: a stage that is written again while it is read.
SHIPPED_ONCE = "gemm.swap_ab._release_stage: no fence_async_shared()"
