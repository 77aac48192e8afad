"""The kernels that are scheduled, and the launches that are made of them: all names are here.

A `Case` is some launches as the engine makes them, with all memory that they reach as it was before
the first. A run puts that back, launches them under a scheduler, and holds all memory to what the
run without preemption left.
"""

import contextlib
import ctypes
import functools
from dataclasses import replace
from random import Random

import pytest
import torch

import megamoe as mm
from megamoe.engine import backends, fused, symm_buffer
from megamoe.engine.call import Call
from megamoe.engine.hopper import HOPPER
from megamoe.engine.local import LocalRanks
from megamoe.engine.planning import Ranks
from megamoe.engine.status import DeviceStatus
from megamoe.kernels.blackwell import grouped
from megamoe.kernels.blackwell import launch as blackwell_launch
from megamoe.kernels.blackwell.mega import launch as mega_tmem_launch
from megamoe.kernels.common import compat
from megamoe.kernels.gluon import (
    dispatch,
    exchange,
    l2_policy,
    permute,
    pipeline,
    pull,
    tile_scheduler,
    window,
)
from megamoe.kernels.gluon.mega import begin, combine, inbox, push, scheduler, state, sync
from megamoe.kernels.gluon.mega import dispatch as mega_dispatch
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.gemm import (
    decode_per_tile,
    decode_per_wave,
    epilogue,
    fp8_rows,
    plain,
    swap_ab,
)
from megamoe.kernels.hopper.mega import kernel, smem
from megamoe.kernels.hopper.mega import launch as mega_launch
from megamoe.kernels.hopper.weights import decode
from megamoe.kernels.portable import combine as portable_combine
from megamoe.kernels.portable import dispatch as portable_dispatch
from megamoe.kernels.portable import sort
from megamoe.planner.fused import ring, weights_ahead
from megamoe.planner.hopper import exchange_of, num_rows
from megamoe.planner.launches import Gemm, GemmSwapAb
from megamoe.planner.tables import split as split_tables
from megamoe.problem import Options
from megamoe.routing.permute import expert_counts
from megamoe.routing.samplers import sample_routing
from tests.emulator import device, policies, tensor_memory
from tests.emulator.device import Scheduled, rewrite, synchronize
from tests.emulator.memory_model import Violation
from tests.emulator.running import Emulated
from tests.emulator.scheduler import Scheduler
from tests.kernels.support import error, tolerance
from tests.pretending import plan_of, pretend_h200

CPU = torch.device("cpu")
# What is mutated: every file that synchronises roles, CTAs or launches of a Gluon kernel.
MODULES = (
    pipeline, l2_policy, swap_ab, epilogue, decode, sync, mega_dispatch, push, inbox,
    scheduler, state, begin, smem, kernel, combine, plain, tile_scheduler, decode_per_tile,
    decode_per_wave, pull, exchange, permute, dispatch, sort, portable_combine,
    portable_dispatch, compat, fp8_rows,
)  # fmt: skip
# Functions that give PTX that waits, and with what; PTX that signals.
TEXTS = (
    (exchange, "SIGNAL", None),
    (exchange, "STORE_IF_MISSED", None),
    *((pipeline, "wait_text", how) for how in (("gpu", "eq"), ("sys", "ge"), ("gpu", "ge"))),
    *((sync, "signal_text", (scope,)) for scope in ("gpu", "sys")),
)
_AT = {"mega": (mega_launch, "mega_kernel"), "swap_ab": (launch, "gemm_swap_ab_kernel"),
       "plain": (launch, "gemm_kernel"), "pull": (pull, "pull_kernel"),
       "exchange": (exchange, "exchange_kernel"), "finish": (exchange, "finish_kernel"),
       "scales": (fp8_rows, "scales_kernel"), "tmem": (blackwell_launch, "gemm_tmem_kernel"),
       "mega-tmem": (mega_tmem_launch, "mega_tmem_kernel")}  # fmt: skip
# Kernels of Triton's own language: they run freely, unless a case schedules them too.
_PLAIN = {"pool": (dispatch, "_pool_kernel"), "count": (permute, "_count_kernel"),
          "place": (permute, "_place_kernel"), "scan": (sort, "_scan_kernel"),
          "schedule": (tile_scheduler, "_schedule_kernel"),
          "combine": (portable_combine, "_combine_kernel"),
          "rows_to_fp8": (portable_dispatch, "_dispatch_kernel"),
          "quantize": (exchange, "_quantize_kernel"), "rows": (pull, "_rows_kernel"),
          "window": (window, "_window_kernel"),
          "place_groups": (grouped, "_place_groups_kernel")}  # fmt: skip
GLUON = {name: getattr(*at) for name, at in _AT.items()}
TRITON = {name: getattr(*at) for name, at in _PLAIN.items()}
CHAIN = ("quantize", "count", "scan", "place", "exchange", "rows", "pull", "swap_ab", "plain",
         "tmem", "scales", "finish", "pool", "rows_to_fp8", "combine")  # fmt: skip
STAGED = ("count", "scan", "place", "pool", "schedule", "swap_ab", "plain", "combine")
# Arguments of staged launches that others fill before them, and again after them.
OTHERS = ("x", "x_scale", "row_weight", "row_dest", "tiles", "num_tiles", "items")


@functools.cache
def kernels():
    """The kernels under a scheduler, by name. L2 is always warm: windows hold all weights."""
    tensor_memory.install()
    made = {name: Scheduled(kernel, name) for name, kernel in (GLUON | TRITON).items()}
    for module in device.MODULES.values():
        if "L2_WARM_BYTES" in module:
            module["L2_WARM_BYTES"] = 0
    return made


def _reasons(device):
    """Hopper runs here."""
    return {b.name: "" if b.name in ("hopper", "reference") else "no" for b in backends.BACKENDS}


@contextlib.contextmanager
def installed(num_sms, given):
    """The engine launches `given` kernels by name here, and others as they are emulated."""
    free = {name: Emulated(kernel) for name, kernel in TRITON.items() if name not in given}
    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in (given | free).items():
            patch.setattr(*(_AT | _PLAIN)[name], kernel)
        pretend_h200(patch, num_sms)
        patch.setattr(backends, "reasons_on", _reasons)
        with new_memory_is_poison():
            yield patch


@contextlib.contextmanager
def new_memory_is_poison():
    """What torch allocates holds NaN, or the largest integers."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


# -- launches as they were made --------------------------------------------------------------------


class Recorder:
    """Stands for a kernel, and keeps what it was launched with."""

    def __init__(self, name, kept):
        self.name, self.kept = name, kept

    def __getitem__(self, grid):
        def keep(**given):
            self.kept.append((self.name, grid, given))

        return keep


def storages(values):
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
        known = {}
        for _, _, given in launches:
            for storage in storages((*given.values(), *held)):
                known[storage.data_ptr()] = storage
        self.before = {at: (s, _bytes(s)) for at, s in known.items() if s.nbytes()}
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


class Late:
    """Launches whose waits run out at any time: their result is right, or there is a report."""

    def __init__(self, name, case, is_reported, hurry=0.003):
        self.name, self.case, self.hurry = name, case, hurry
        self.is_reported = is_reported

    @property
    def _result(self):
        given = self.case.launches[-1][2]
        return given["y" if "y" in given else "out"]

    def learn(self):
        self.case.learn()
        self.y = self._result.clone()

    def run(self, policy, log=None):
        case, was = self.case, (self.case.is_strict, self.case.wanted)
        case.is_strict, case.wanted = False, None
        if hasattr(policy, "seed"):
            policy = policies.Hurried(policy, Random(policy.seed), self.hurry)
        try:
            scheduler = case.run(policy, log)
        finally:
            case.is_strict, case.wanted = was  # it is shared with tests that are strict
        self.num_reported = int(self.is_reported(case.launches[-1][2]))
        if not (self.num_reported or torch.equal(self._result, self.y)):
            raise Violation("a wrong result, and nobody says so")
        return scheduler


def late_case():
    """One fused launch."""
    return Late("fused-late", fused_case(), lambda given: bool(given["report"].any()))


def late_decoders_case():
    """GEMMs that decode FP4 once per wave, CTA for CTA."""
    case = staged_case("w4a8_block", PER_WAVE, num_sms=3, hidden=512, counts=(5, 3, 2, 1))
    return Late("plain-late", case, lambda given: int(given["error"]) < 0, hurry=0.0005)


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
               has_bad_slot=False, num_shared=0):  # fmt: skip
    """One rank."""
    kept = []
    anew = weights_of.__wrapped__ if num_shared else weights_of  # not packed yet, to be so as one
    w = anew(recipe, experts, hidden, intermediate, has_bias)
    shared = anew(recipe, num_shared, hidden, intermediate) if num_shared else None
    inputs = tokens_of(tokens, experts, hidden, top_k)
    if has_bad_slot:
        inputs[1][-1, -1] = experts
    status, stats = DeviceStatus(CPU), torch.zeros(experts, dtype=torch.int64)
    if poison is not None:
        status.counters.view(-1)[poison[0]] = poison[1]
    slots = inputs[1].numel() + tokens * num_shared
    rows, wave_rows = ring(num_rows(slots, experts + num_shared), pool_rows, 8)
    with installed(num_sms, {"mega": Recorder("mega", kept)}):
        step = few_stages_fused(
            plan_of(inputs, w, shared=shared, mode="fused").mega, stages=stages, window=window
        )  # fmt: skip
        config = replace(
            step.config, tile=replace(step.config.tile, block_m=8), pool_rows=rows,
            wave_rows=wave_rows,
        )  # fmt: skip
        call = Call(*inputs, w, Options(), shared, status, stats, None, 30.0, True)
        fused.run(call, replace(step, config=config), absent=absent)
    return Case("fused", kept)


@functools.cache
def local_case(recipe="w8a8", ranks=2, ctas=2, counts=(2, 1), experts=4, hidden=256,
               intermediate=256, has_bad_slot=False):  # fmt: skip
    """Several ranks of one launch."""
    kept = []
    w = weights_of(recipe, experts, hidden, intermediate)
    inputs = tokens_of(sum(counts), experts, hidden)
    if has_bad_slot:
        inputs[1][-1, -1] = experts
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
        HOPPER.run(Call(*inputs, w, Options(), None, DeviceStatus(CPU)), plan)
    return Case("staged", kept, is_early=is_early)


@functools.cache
def split_case(recipe, tile, counts=(5, 3), num_sms=3, hidden=256, intermediate=256):
    """L1 that counts its tiles and L2 that waits for them, on parts of few SMs."""
    kept = []
    w = weights_of(recipe, len(counts), hidden, intermediate)
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))]
    x, _, gates = tokens_of(len(slots), len(counts), hidden, 1)
    inputs = x, slots.view(-1, 1), gates
    both = {name: Recorder(name, kept) for name in ("swap_ab", "plain")}
    given = {"kernel": "gemm"} if isinstance(tile, Gemm) else {"block_m": tile.block_m}
    if isinstance(tile, Gemm) and tile.decode_ahead:
        given |= {"decode_ahead": tile.decode_ahead}
    with installed(num_sms, both) as patch:
        patch.setattr(split_tables, "SMS_UNIT", 1)
        plan = plan_of(inputs, w, mode="split", **given)
        (one,) = plan.passes
        few = tuple(
            replace(step, config=few_stages(step.config, tile.num_stages))
            if step.name in ("l1", "l2")
            else step
            for step in one.launches
        )
        plan = replace(plan, passes=(replace(one, launches=few),))
        HOPPER.run(Call(*inputs, w, Options(), None, DeviceStatus(CPU)), plan)
    kept.sort(key=lambda one: not one[2]["GATED"])  # each was launched by a thread of its own
    assert len(kept) == 2
    return Case("split", kept, is_early=True)


def whole_case(tile, tokens, recipe="w8a8", experts=3, hidden=256, intermediate=128,
               num_sms=2):  # fmt: skip
    """All launches of staged calls, which overlap; the last slot of each is a bad one."""
    w = weights_of(recipe, experts, hidden, intermediate)
    given = [tokens_of(tokens, experts, hidden, seed=seed) for seed in range(2)]
    masked = [tuple(map(torch.clone, one)) for one in given]
    for (_, idx, _), (_, left, _) in zip(given, masked, strict=True):
        idx[-1, -1], left[-1, -1] = experts, -1
    with installed(num_sms, {}):
        plan = plan_of(given[0], w, mode="staged", tile=few_stages(tile), overlap_launches=True)
    assert plan.overlaps
    wanted = []

    def make():
        status, stats = DeviceStatus(CPU), torch.zeros(experts, dtype=torch.int64)
        got = []

        def host():
            for one in given:
                got.append(HOPPER.run(Call(*one, w, Options(), None, status, stats), plan))

        def check():
            if not wanted:
                for y, one in zip(got, masked, strict=True):
                    right = mm.moe(*one, w, backend="reference")
                    assert error(y, right) <= tolerance(recipe)
                wanted.extend(got)
            if not all(map(torch.equal, got, wanted)):
                raise Violation("another result")
            if int(status.bad_slot) != 2 * tokens - 1:
                raise Violation("a bad slot that is not reported")
            counts = sum(expert_counts(one[1], experts) for one in masked)
            if not torch.equal(stats, counts):
                raise Violation("other counts")

        return (host,), check

    return Live("staged-whole", make, num_sms, kernels=STAGED)


SLAB = GemmSwapAb(block_m=8, slabs=1, k_blocks=1, num_stages=3)
WIDE = GemmSwapAb(block_m=64, slabs=2, k_blocks=1, num_stages=3)  # rows turn in shared memory
NARROW = GemmSwapAb(block_m=8, slabs=2, k_blocks=1, num_stages=3)
PLAIN = Gemm(3)
STATIC = Gemm(3, schedule="static")
DYNAMIC = Gemm(3, schedule="dynamic")
PER_TILE = Gemm(2, 2, 8, 216, 56, 24)
PER_WAVE = Gemm(2, 2, 24, 216, 56, 24, decode_ahead=4)
