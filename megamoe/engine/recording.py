"""Which kernels a layer launches, found without a GPU: the engine's own calls on tensors without
memory, seen where Triton would compile (docs/hopper.md, the first call).

Triton keys its disk cache by source, argument types, alignments, constants and options. All of
them are made here by Triton's own launch code from what the engine's launchers pass, so a key that
is found here is the one that a launch looks for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction

from megamoe.engine import chain, fused, parallel, planning, symm_buffer
from megamoe.engine.call import Call
from megamoe.engine.functional import launch
from megamoe.engine.graph_pool import MAX_TOKENS
from megamoe.engine.layer import MoE
from megamoe.engine.packed import Aside, PackedMatrix
from megamoe.engine.refresh_on_gpu import OnGpu
from megamoe.engine.row_counts import row_counts
from megamoe.engine.status import DeviceStatus
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import NotAvailable, require
from megamoe.formats.quantized import Quantized, empty
from megamoe.formats.spec import format_named, recipe_named
from megamoe.hardware import Hardware, of_gpu
from megamoe.kernels.gluon import compiler_hooks
from megamoe.kernels.gluon.mega.arguments import World
from megamoe.kernels.hopper.weights import pack
from megamoe.planner import chain as chain_plan
from megamoe.planner.buckets import bucket_of, planned_call
from megamoe.planner.call import CallSpec, SharedSpec
from megamoe.planner.choice import Value
from megamoe.planner.copies import around
from megamoe.planner.numerics import image_of
from megamoe.planner.overrides import checked
from megamoe.planner.plan import Plan, plan_call
from megamoe.planner.tables.hopper import COUNTERS
from megamoe.problem import Options, Problem

META = torch.device("meta")
DEVICE = "compiled without a GPU"  # the name of the pretended device in Triton's own tables
IDS = {64: torch.int64, 32: torch.int32}  # dtypes of topk_idx, by their bits
SLOW = ("mega_kernel", "gemm_kernel", "gemm_swap_ab_kernel")  # to compile: first, longest first


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer as its kernels see it: sizes and words, no tensors.

    num_experts   over all ranks
    num_ranks     processes of a group; 1 is none
    options       what the layer computes
    fits_e4m3, can_be_placed   of its FP4 weights: which image they are
    has_bias      whether it has biases
    shared        shared experts, and whether they run in the others' launches; None: none
    max_tokens    over a group: `max_tokens_per_rank`
    graphs        whether the layer replays graphs of its own
    local_ranks   ranks in one launch, as `LocalRanks` has them: then as many as num_ranks; 1: none
    id_bits       of the integers in topk_idx that calls pass
    has_stats     whether calls count tokens; those of `mm.moe` do not
    overrides     as `MoE` passes them to the planner: backend, mode and others
    machine       GPU: its name, SMs, architecture and bytes of memory, as `of_gpu` takes them
    """

    recipe: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    machine: tuple[str, int, str, int]
    num_ranks: int = 1
    options: Options = Options()  # noqa: RUF009
    fits_e4m3: bool = True
    can_be_placed: bool = True
    has_bias: bool = False
    shared: SharedSpec | None = None
    max_tokens: int | None = None
    graphs: bool = False
    local_ranks: int = 1
    id_bits: tuple[int, ...] = (64, 32)
    has_stats: bool = True
    overrides: tuple[tuple[str, Value], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LayerSpec:
        """The inverse of `as_dict`, from JSON."""
        shared = data["shared"]
        return cls(**{
            **data, "options": Options(**data["options"]),
            "shared": None if shared is None else SharedSpec(**shared),
            "overrides": tuple((name, value) for name, value in data["overrides"]),
            "machine": tuple(data["machine"]), "id_bits": tuple(data["id_bits"]),
        })  # fmt: skip

    @property
    def hardware(self) -> Hardware:
        """The machine that is compiled for."""
        return of_gpu(*self.machine)

    @property
    def num_local(self) -> int:
        """Experts that the layer holds: a rank's, or those of all ranks of a launch."""
        return self.num_experts * self.local_ranks // self.num_ranks

    @property
    def ids(self) -> tuple[torch.dtype, ...]:
        """Dtypes of topk_idx."""
        return tuple(IDS[bits] for bits in self.id_bits)

    def plan(self, num_tokens: int) -> Plan:
        """Of a call with BF16 tokens."""
        problem = Problem(
            num_tokens, self.hidden, self.intermediate, self.num_experts, self.top_k,
            self.num_ranks, self.recipe,
        )  # fmt: skip
        call = CallSpec(
            problem, combine=self.options.combine, fits_e4m3=self.fits_e4m3,
            shared=self.shared, local_ranks=self.local_ranks,
            max_tokens=self.max_tokens if self.num_ranks > 1 else None, has_bias=self.has_bias,
        )  # fmt: skip
        overrides = checked(dict(self.overrides))
        call = planned_call(call, self.hardware.arch, dict(overrides), num_tokens)
        return plan_call(call, self.hardware, overrides)


Work = tuple[LayerSpec, Sequence[int]]  # a layer, and numbers of tokens of its calls


def spec_of(layer: MoE) -> LayerSpec:
    """A layer that is there."""
    weights, call = layer.weights, layer.plan(1).call
    images = [w for w in (weights.w13, weights.w2) if isinstance(w, PackedMatrix)]
    device = torch.cuda.get_device_properties(weights.device)
    machine = planning.hardware_of(weights.device)
    return LayerSpec(
        weights.recipe, weights.hidden, weights.intermediate, call.problem.num_experts,
        layer.top_k, (device.name, machine.num_sms, machine.arch, device.total_memory),
        num_ranks=call.problem.num_ranks, options=layer.options, fits_e4m3=call.fits_e4m3,
        can_be_placed=all(w.kind != "mx_image" for w in images),
        has_bias=weights.b13 is not None, shared=call.shared,
        max_tokens=layer.max_tokens_per_rank, graphs=layer._graphs is not None,
        overrides=layer._overrides(layer.mode),
    )  # fmt: skip


class Cubin(NamedTuple):
    """One compilation: the kernel, and the name that Triton's disk cache has for it."""

    kernel: str
    hash: str
    file: str  # its metadata
    compile: Callable[[], CompiledKernel]

    @property
    def is_there(self) -> bool:
        """Whether the disk cache has it."""
        return get_cache_manager(self.hash).get_group(self.file) is not None


def cubins_of(layer: LayerSpec, token_counts: Sequence[int]) -> list[Cubin]:
    """Everything that calls of a layer with these numbers of tokens compile, slow ones first."""
    plan = layer.plan(max(token_counts, default=1))
    require(
        plan.backend in ("hopper", "blackwell", "portable"),
        "only GPU backends compile kernels",
        got=f"backend {plan.backend} on {layer.hardware.name}",
        kind=NotAvailable,
    )
    with recorded(target_of(layer.hardware)) as cubins:
        for num in sorted(set(token_counts) - {0}):
            make_calls(layer, num)
        pack_experts(layer)
    return sorted(cubins.values(), key=_order)


def _order(one: Cubin) -> int:
    return SLOW.index(one.kernel) if one.kernel in SLOW else len(SLOW)


def cubins_of_all(works: Sequence[Work]) -> list[Cubin]:
    """Of several layers, each compilation once, slow ones first."""
    cubins = {one.hash: one for work in works for one in cubins_of(*work)}
    return sorted(cubins.values(), key=_order)


def target_of(machine: Hardware) -> GPUTarget:
    """What Triton calls this machine's architecture."""
    return GPUTarget("cuda", int(machine.arch.removeprefix("sm_").rstrip("a")), 32)


# -- where Triton compiles -------------------------------------------------------------------------


class _Driver:
    """As much of a driver as a launch asks before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return DEVICE

    def get_current_stream(self, device: object) -> int:
        return 0


@contextmanager
def on_machine_of(target: GPUTarget) -> Iterator[None]:
    """What is compiled inside asks about a GPU of this target. Triton has one driver a process."""
    before = driver._active
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def recorded(target: GPUTarget) -> Iterator[dict[str, Cubin]]:
    """Launches inside are bound as on a GPU of this target and kept, by hash; none is compiled.

    Not beside launches of other threads: Triton has one driver.
    """
    cubins: dict[str, Cubin] = {}
    kernels: list[JITFunction[Any]] = []
    real_run, real_compile = JITFunction.run, triton.compiler.compile

    def run(kernel: JITFunction[Any], *args: Any, **options: Any) -> object:
        kernels.append(kernel)
        return real_run(kernel, *args, **{**options, "warmup": True})

    def keep(src: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> object:
        one = _cubin(src, target, dict(options or {}), real_compile)
        return cubins.setdefault(one.hash, one)

    JITFunction.run, triton.compiler.compile = run, keep
    try:
        with on_machine_of(target):
            yield cubins
    finally:
        JITFunction.run = real_run
        triton.compiler.compile = real_compile
        for kernel in kernels:
            kernel.device_caches.pop(DEVICE, None)
            kernel.compile = real_compile


def _cubin(src: Any, target: Any, options: dict[str, Any], compile_it: Any) -> Cubin:
    """The key is made as `triton.compile` makes it."""
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **src.parse_options()})
    env = triton.compiler.compiler.get_cache_invalidating_env_vars()
    key = get_cache_key(src, backend, parsed, env_vars=env)
    is_ours = getattr(src.fn, "is_ours", False)

    def make() -> CompiledKernel:
        with on_machine_of(target), compiler_hooks.applied() if is_ours else nullcontext():
            kernel: CompiledKernel = compile_it(src, target=target, options=options)
            return kernel

    name = src.name[:150]
    return Cubin(src.fn.__name__, hashlib.sha256(key.encode()).hexdigest(), f"{name}.json", make)


# -- calls on tensors without memory ---------------------------------------------------------------


def make_calls(layer: LayerSpec, num_tokens: int) -> None:
    """The launches of a call with so many tokens, in all ways that the layer makes it."""
    plan = layer.plan(num_tokens)
    weights, shared = experts_of(layer)
    stats = torch.empty(layer.num_local, dtype=torch.int64, device=META)
    if layer.local_ranks > 1 and plan.is_chained:
        own = layer.num_experts // layer.num_ranks
        _chained(layer, plan, weights[:own], None, stats[:own], num_tokens)
        return
    if layer.local_ranks > 1:
        _in_one_launch(layer, plan, weights, stats, num_tokens)
        return
    if layer.num_ranks > 1:
        _over_group(layer, plan, weights, shared, stats, num_tokens)
        return
    for dtype in layer.ids:
        tokens, counted = _tokens(layer, num_tokens, dtype), stats if layer.has_stats else None
        launch(Call(*tokens, weights, layer.options, shared, _status(), counted), plan)
    if layer.graphs and num_tokens <= MAX_TOKENS:
        _captured(layer, weights, shared, stats, bucket_of(num_tokens, MAX_TOKENS))


def pack_experts(layer: LayerSpec) -> None:
    """What looks at FP4 experts that lie on a Hopper GPU and packs them, when the layer is built or
    refreshed."""
    from megamoe.kernels.common.finite import new_flags
    from megamoe.kernels.hopper.weights import facts_on_gpu, pack_on_gpu

    for experts in experts_of(layer):
        if experts is None or not experts.is_packed:
            continue
        both = experts.w13, experts.w2
        ones = [empty((1, *matrix.shape[1:]), matrix.spec, META) for matrix in both]
        for matrix, one in zip(both, ones, strict=True):
            assert isinstance(matrix, PackedMatrix)
            if matrix.kind != "nv_image":
                flags = new_flags(1, META)
                pair, num = facts_on_gpu.pair_of(facts_on_gpu.by_gate(one), flags)
                facts_on_gpu.launch(pair, num, flags, 0)
            pack_on_gpu.launch(matrix.packed, [0], one)
        for sources in ((ones[0], ones[1]), (ones[0], None), (None, ones[1])):
            gpu = OnGpu([0], sources, both, (None, None), False, new_flags(1, META))
            gpu.look()
            gpu.write()


def _captured(
    layer: LayerSpec, weights: ExpertWeights, shared: ExpertWeights | None, stats: Tensor,
    bucket: int,
) -> None:  # fmt: skip
    """What a graph holds: the call on its own inputs, and the kernels around it."""
    from megamoe.kernels.portable.graph_io import (
        Inputs,
        ReplayArgs,
        copy_inputs,
        copy_output,
        read_args,
    )

    replay_args = ReplayArgs.empty(1, META)
    inputs = Inputs.empty(bucket, layer.hidden, layer.top_k, META)
    steps = around(bucket, layer.hidden, layer.top_k)
    read_args(replay_args, steps.read_args)
    copy_inputs(replay_args.now, inputs, steps.copy_inputs)
    call = Call(
        inputs.x, inputs.topk_idx, inputs.topk_weights, weights, layer.options, shared,
        status=_status(), stats=stats, num_valid=inputs.count,
    )  # fmt: skip
    copy_output(replay_args.now, launch(call, layer.plan(bucket)), steps.copy_output)


def _around_graph(
    layer: LayerSpec, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, count: Tensor
) -> None:
    """The kernels around a graph over a group: what it is about, its inputs and its output."""
    from megamoe.kernels.portable import graph_io

    args = graph_io.ReplayArgs.empty(1, META)
    steps = around(*x.shape, layer.top_k)
    inputs = graph_io.Inputs(x, topk_idx, topk_weights, count)
    graph_io.read_args(args, steps.read_args)
    graph_io.copy_inputs(args.now, inputs, steps.copy_inputs)
    graph_io.copy_output(args.now, torch.empty_like(x), steps.copy_output)


def _in_one_launch(
    layer: LayerSpec, plan: Plan, weights: ExpertWeights, stats: Tensor, num_tokens: int
) -> None:
    """The launch of `LocalRanks`, whose fullest rank has so many tokens."""
    assert plan.mega is not None
    where, num = plan.exchange, layer.local_ranks
    symm = symm_buffer.symm_buffer_in(
        torch.empty(where.num_bytes, dtype=torch.uint8, device=META), where
    )
    peers = torch.empty(num, dtype=torch.int64, device=META)
    world = World(num, num, 0, peers, symm.signals, symm.inbox)
    fused.over(
        symm, num_tokens, weights, layer.options, world, stats, step=plan.mega, status=_status(),
        timeout_s=1.0,
    )  # fmt: skip


def _over_group(
    layer: LayerSpec, plan: Plan, weights: ExpertWeights, shared: ExpertWeights | None,
    stats: Tensor, num_tokens: int,
) -> None:  # fmt: skip
    """One rank's launches: fused over symmetric memory, or staged around the exchange of rows."""
    if plan.mode == "fused" and layer.graphs and plan.num_passes == 1:
        tokens = _tokens(layer, plan.fused_tokens, torch.int64)
        _around_graph(layer, *tokens, torch.empty(1, dtype=torch.int32, device=META))
    if plan.is_chained:
        _chained(layer, plan, weights, shared, stats, num_tokens)
        return
    if plan.mode == "fused":
        assert plan.mega is not None
        passes, each = plan.num_passes, plan.fused_tokens
        where = plan.exchange
        memory = torch.empty(where.num_bytes, dtype=torch.uint8, device=META)
        symm = symm_buffer.symm_buffer_in(memory, where)
        for dtype in layer.ids:
            symm.put(*_tokens(layer, num_tokens, dtype), plan.put(num_tokens))
        peers = torch.empty(layer.num_ranks, dtype=torch.int64, device=META)
        world = World(layer.num_ranks, 1, 0, peers, symm.signals, symm.inbox)
        for number in range(passes):
            fused.over(
                symm, each, weights, layer.options, world, stats, step=plan.mega,
                status=_status(), timeout_s=1.0, number=number,
            )  # fmt: skip
        return

    def planned(num: int, is_quantized: bool) -> Plan:
        return layer.plan(num_tokens)

    make = parallel.COMPUTE[plan.backend]
    compute = make(weights, shared, layer.options, layer.num_experts, stats, planned, _status())
    for dtype in layer.ids:
        x, idx, gates = _tokens(layer, num_tokens, dtype)
        sent = compute.tokens(x)
        slots = num_tokens * layer.top_k
        for rows in row_counts(slots, layer.num_ranks):
            received = _like(sent, rows)
            expert = torch.empty(rows, dtype=torch.int64, device=META)
            result = compute.rows(
                received, expert, torch.empty(rows, dtype=torch.float32, device=META)
            )
            if rows == slots:
                at = torch.empty(rows, dtype=torch.int64, device=META)
                compute.combine(result, at, x, idx, gates)


def _chained(
    layer: LayerSpec, plan: Plan, weights: ExpertWeights, shared: ExpertWeights | None,
    stats: Tensor, num_tokens: int,
) -> None:  # fmt: skip
    """One rank's launches of a chain."""
    where = chain_plan.memory(replace(plan.call, max_tokens=layer.max_tokens), plan.backend)
    memory = torch.empty(where.num_bytes, dtype=torch.uint8, device=META)
    peers = torch.empty(layer.num_ranks, dtype=torch.int64, device=META)
    me = chain.Member(chain.buffer_in(memory, where), peers, 0, layer.num_ranks)
    for dtype in layer.ids:
        tokens = _tokens(layer, num_tokens, dtype)
        call = Call(*tokens, weights, layer.options, shared, _status(), stats)
        chain.run(me, call, plan)
    bound = plan.call.max_tokens or 0
    if layer.graphs and plan.mode == "chain" and bound <= MAX_TOKENS:
        count = torch.empty(1, dtype=torch.int32, device=META)
        tokens = _tokens(layer, bound, torch.int32)
        call = Call(*tokens, weights, layer.options, shared, _status(), stats, count)
        chain.run(me, call, layer.plan(bound))
        _around_graph(layer, *tokens, count)


def _like(tokens: Quantized, rows: int) -> Quantized:
    """As many rows in the same format."""
    acts = empty((rows, tokens.shape[1]), tokens.spec, META)
    if acts.global_scale is None:
        return acts
    ones = torch.empty(rows, dtype=torch.float32, device=META)
    return Quantized(acts.data, acts.scale, acts.format, acts.shape, ones)


def _tokens(layer: LayerSpec, num: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.empty(num, layer.hidden, dtype=torch.bfloat16, device=META)
    idx = torch.empty(num, layer.top_k, dtype=dtype, device=META)
    return x, idx, torch.empty(num, layer.top_k, dtype=torch.float32, device=META)


def _status() -> DeviceStatus:
    """Words without memory, as long as a layer's."""
    from megamoe.engine.status import FIRST_COUNTER

    num = FIRST_COUNTER + COUNTERS
    return DeviceStatus.around(torch.empty(num, dtype=torch.int32, device=META))


def experts_of(layer: LayerSpec) -> tuple[ExpertWeights, ExpertWeights | None]:
    """A rank's experts, and the shared ones, without memory."""
    plan = layer.plan(1)
    num, recipe = layer.num_local, layer.recipe
    joined = plan.call.joined if plan.backend == "hopper" else 0
    both = _experts(layer, recipe, layer.intermediate, num + joined, plan.backend)
    if layer.shared is None:
        return both, None
    if joined:
        return both[:num], both[num:]
    one = layer.shared
    return both, _experts(layer, one.recipe, one.intermediate, one.num, plan.backend)


def _experts(
    layer: LayerSpec, recipe: str, intermediate: int, num: int, backend: str
) -> ExpertWeights:
    fmt, hidden = recipe_named(recipe).weights, layer.hidden
    shapes = {"w13": (num, 2, intermediate, hidden), "w2": (num, hidden, intermediate)}
    facts = pack.Facts(layer.fits_e4m3, True, layer.can_be_placed and fmt.name == "mxfp4")
    parts: dict[str, Any] = {}
    for name, shape in shapes.items():
        plain = empty(shape, format_named(fmt.name), META)
        if backend != "hopper" or fmt.element.bits != 4:
            parts[name] = plain
            continue
        kind = image_of(recipe, fits_e4m3=facts.fits_e4m3, can_be_placed=facts.can_be_placed)
        image = pack.empty_image(kind, shape, META)
        parts[name] = PackedMatrix(image, fmt.name, Aside(num, facts))
    if fmt.has_global:
        parts |= {
            "x_global": torch.empty((), dtype=torch.float32, device=META),
            "acts_global": _floats(num),
        }
    if layer.has_bias:
        parts |= {"b13": _floats(num, 2, intermediate), "b2": _floats(num, hidden)}
    return ExpertWeights(recipe, **parts)


def _floats(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32, device=META)
