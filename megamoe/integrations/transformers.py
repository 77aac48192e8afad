"""Hugging Face transformers: `experts_implementation="megamoe"`.

    from megamoe.integrations.transformers import use
    use(AutoModelForCausalLM.from_pretrained(name))

A model's experts module keeps its parameters; at its first call we make ExpertWeights of them and
keep these beside the module until a parameter changes. What its gate computes is found by asking
it: its `_apply_gate` is compared with our activations on a few numbers.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.engine import backends, checkpoint
from megamoe.engine.fingerprint import Seal
from megamoe.engine.graph_pool import GraphPool
from megamoe.engine.layer import MoE
from megamoe.engine.loader import COUNTS, TOP_KS
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import DTypeError, NotAvailable, RangeError, ShapeError, require
from megamoe.formats.quantize import FLOATS
from megamoe.formats.spec import recipe_named, recipe_on
from megamoe.integrations import taken as one_copy
from megamoe.integrations.stacked import e8m0_codes
from megamoe.integrations.taken import TAKEN, Form, Taken
from megamoe.integrations.transformers_gate import Asked, Gate, gate_of
from megamoe.problem import WIDTH_MULTIPLE

PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias",
              "gate_up_proj_scale_inv", "down_proj_scale_inv")  # fmt: skip
FP8_BLOCK = 128
# Decode; each bucket of larger calls would be a graph more in every layer, and prefill does not
# wait for the host.
GRAPH_TOKENS = 128


@dataclass(slots=True)
class CachedLayer:
    """The layer of one module, and what its parameters were when it was made."""

    layer: MoE
    places: tuple[Any, ...]
    copied: tuple[str, ...]  # parameters whose memory the layer does not share
    seal: Seal
    masks: bool  # as of `taken.Taken`
    gate: Asked

    def is_current(self, module: nn.Module, top_k: int) -> bool:
        """Whether the module's parameters are still those, and what its gate may read."""
        return (
            self.places == (top_k, *_places(module))
            and self.gate.holds(module)
            and self.seal.holds([getattr(module, name) for name in self.copied])
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is of no module; a weak reference has one owner."""
        return CachedLayer, (self.layer, (), self.copied, self.seal, self.masks, self.gate)


_ours: set[str] = set()  # names that `register` gave


def register(
    name: str = "megamoe",
    *,
    recipe: str | None = None,
    backend: str = "auto",
    max_tokens_per_rank: int | None = None,
) -> None:
    """Offer the layer to transformers as `experts_implementation=name`.

    From transformers 5.23 on also as `DistributedConfig(ep_implementation=name)`: experts over
    several ranks, which then run through the layer whatever `experts_implementation` is.

    name     one that transformers does not have itself
    recipe   None is that of the module: "bf16", which gives the model's own results to rounding,
             "w8a8" for FP8 experts, and for FP4 ones "w4a8", on Hopper "w4a8_block"; another
             rounds the experts to it once. Several recipes may stand beside each other under
             several names.
    backend  as for `mm.moe`
    max_tokens_per_rank  over several ranks: the largest call, which fused ones need to know
    """
    if recipe is not None:
        recipe_named(recipe)
    require(isinstance(name, str) and bool(name.strip()), "the name must be a word",
            got=repr(name), kind=RangeError)  # fmt: skip
    require(backend in backends.NAMES, f"backend must be one of {', '.join(backends.NAMES)}",
            got=repr(backend), kind=RangeError)  # fmt: skip
    interfaces, over_ranks = _interfaces(), _ep_interface()
    names = [*interfaces, over_ranks[0]()] if over_ranks else interfaces
    require(
        name in _ours or (name != "eager" and not any(name in known for known in names)),
        "the name must not be one of transformers' own implementations",
        got=repr(name),
        fix='a comparison with it would compare megamoe with itself: register("megamoe")',
        kind=RangeError,
    )
    _ours.add(name)
    forward = experts_forward(recipe, backend)
    for known in interfaces:
        known.register(name, forward)
    if over_ranks:
        from megamoe.integrations.transformers_ep import implementation

        interface, base = over_ranks
        interface.register(name, implementation(base, recipe, backend, max_tokens_per_rank))


def use(
    model: Any,
    name: str = "megamoe",
    *,
    recipe: str | None = None,
    backend: str = "auto",
    take: bool = False,
    cuda_graphs: bool | GraphPool = False,
) -> int:
    """Register, set, and make sure that it means something; returns the number of experts modules.

    `model.set_experts_implementation` says nothing about a model whose experts do not use
    transformers' interface: it would go on as before. Here such a model is refused.

    name, recipe, backend  as for `register`
    take  make all layers now, where the model lies; they hold its experts alone from now on, one
          copy, and `torch.compile` sees each as one node. Parameters, state_dict and
          `save_pretrained` bring them back bit for bit; `give_back(model)` ends it
    cuda_graphs  with `take`: replay calls of up to 128 tokens from graphs, whose memory all layers
          share; a `GraphPool` may say another number. Nothing on a CPU
    """
    require(
        take or not cuda_graphs, "graphs are of layers that hold their experts",
        got="cuda_graphs without take", fix="use(model, take=True, cuda_graphs=True)",
        kind=NotAvailable,
    )  # fmt: skip
    require(
        callable(getattr(model, "modules", None)), "use takes a model that is in memory",
        got=repr(model), fix="load it first, with from_pretrained", kind=DTypeError,
    )  # fmt: skip
    register(name, recipe=recipe, backend=backend)
    modules = [
        m for m in model.modules() if hasattr(m, "is_concatenated") and hasattr(m, "has_gate")
    ]
    require(
        bool(modules),
        "a model's experts must use the experts interface of transformers",
        got=f"none in {type(model).__name__}",
        fix="nothing would change: this model runs its own code whatever is set",
        kind=NotAvailable,
    )
    model.set_experts_implementation(name)
    others = {m.config._experts_implementation for m in modules} - {name}
    require(
        not others, "all experts must have taken the implementation", got=sorted(map(str, others)),
        fix="set it for every part of the model (a dict)", kind=NotAvailable,
    )  # fmt: skip
    for module in modules:
        _check_module(module)
    if take:
        graphs = GraphPool(GRAPH_TOKENS) if cuda_graphs is True else cuda_graphs
        _take_all(modules, Implementation(recipe, backend, graphs))
    return len(modules)


def _take_all(modules: list[Any], how: Implementation) -> None:
    """Take the experts of all modules or, where one is refused, of none that had its own."""
    free = [module for module in modules if TAKEN not in module.__dict__]
    try:
        for module in modules:
            how.take(module, _top_k(module))
    except BaseException:
        for module in free:
            if TAKEN in module.__dict__:
                one_copy.give_back(module)
        raise


def give_back(model: nn.Module) -> int:
    """Make taken experts parameters of their modules again; returns the number of modules."""
    modules = [module for module in model.modules() if TAKEN in module.__dict__]
    for module in modules:
        one_copy.give_back(module)
    return len(modules)


def _top_k(module: Any) -> int:
    config = module.config
    values = [v for key in TOP_KS if isinstance(v := getattr(config, key, None), int)]
    require(
        bool(values),
        f"the model's config must have one of {', '.join(TOP_KS)}",
        got=type(config).__name__,
        fix="leave take out: the first call says how many experts a token has",
        kind=NotAvailable,
    )
    return values[0]


@dataclass(frozen=True, slots=True)
class Implementation:
    """What a name stands for.

    graphs  of layers that are made to be taken; two that differ in it alone are the same
    """

    recipe: str | None
    backend: str
    graphs: bool | GraphPool = field(default=False, compare=False)

    def take(self, module: nn.Module, top_k: int) -> None:
        """Let the layer of a module hold its experts alone."""
        taken = _taken(module, self)
        if taken is not None:
            now, then = _largest(self.graphs), _largest(taken.key.graphs)
            require(
                now in (0, then), "experts that were taken run as they were taken",
                got=f"cuda_graphs now, of {now} tokens where they had {then or 'none'}",
                fix="give_back(model) first", kind=NotAvailable,
            )  # fmt: skip
            return
        layer = make_layer(module, top_k, self.recipe, self.backend, cuda_graphs=self.graphs)
        form = Form(bool(getattr(module, "is_transposed", False)), gate_of(module).gate_up)
        one_copy.take(module, layer, self, form, PARAMETERS, masks=not _has_all(module, layer))


def _largest(graphs: bool | GraphPool) -> int:
    """Tokens of the largest call that is replayed; 0 if none is."""
    return graphs.max_tokens if isinstance(graphs, GraphPool) else 0


def _taken(module: nn.Module, mine: Implementation) -> Taken | None:
    """The layer that took a module's experts; None: none did."""
    taken: Taken | None = getattr(module, TAKEN, None)
    if taken is not None:
        require(
            taken.key == mine,
            "experts that were taken run as they were taken",
            got=f"{mine} for {taken.key}",
            fix="give_back(model) first",
            kind=NotAvailable,
        )
    return taken


def experts_forward(recipe: str | None = None, backend: str = "auto") -> Callable[..., Tensor]:
    """The function that `register` registers: (module, tokens, expert ids, weights) -> tokens."""
    layers: weakref.WeakKeyDictionary[nn.Module, CachedLayer] = weakref.WeakKeyDictionary()
    mine = Implementation(recipe, backend)

    def forward(
        self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        taken = _taken(self, mine)
        refuse_gradients(self if taken is None else taken.parameters)
        if taken is None:
            y: Tensor = watched(self, hidden_states, top_k_index, top_k_weights)
            return y
        if not torch.compiler.is_compiling():
            taken.refuse_changed(self)
        return run(taken.layer, taken.masks, hidden_states, top_k_index, top_k_weights)

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="use(model, take=True) makes the experts one node"
    )
    def watched(
        self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        top_k = top_k_index.shape[-1]
        prepared = layers.get(self)
        if prepared is None or not prepared.is_current(self, top_k):
            prepared = layers[self] = keep(self, top_k, make_layer(self, top_k, recipe, backend))
        return run(prepared.layer, prepared.masks, hidden_states, top_k_index, top_k_weights)

    return forward


def refuse_gradients(parameters: nn.Module | dict[str, nn.Parameter]) -> None:
    """Refuse experts that a caller trains: the layer has no backward, and they would get nothing.

    parameters  those of a module, or a module that has them
    """
    if not torch.is_grad_enabled():
        return
    own = parameters._parameters if isinstance(parameters, nn.Module) else parameters
    require(
        not any(p is not None and p.requires_grad for p in own.values()),
        "the layer has no backward: the experts' parameters must not require grad",
        got="requires_grad under grad mode",
        fix="call it under torch.no_grad(), or freeze the experts with requires_grad_(False)",
        kind=NotAvailable,
    )


def run(
    layer: MoE, masks: bool, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """One call of a module's layer, here or under transformers' own expert parallelism."""
    if masks:  # ids past the last local expert are other ranks'
        top_k_index = top_k_index.masked_fill(top_k_index >= layer.num_experts, -1)
    return call(layer, hidden_states, top_k_index, top_k_weights)


def _has_all(module: Any, layer: MoE) -> bool:
    """Whether a module has all experts of its model: then no id is another rank's."""
    counts = (getattr(module.config, key, None) for key in COUNTS)
    return any(isinstance(num, int) and num == layer.num_experts for num in counts)


def keep(module: nn.Module, top_k: int, layer: MoE) -> CachedLayer:
    """A layer that was just made of a module, with what tells whether it is still current."""
    copied = _copied(module, layer)
    seal = Seal([getattr(module, name) for name in copied])
    masks = not _has_all(module, layer)
    return CachedLayer(layer, (top_k, *_places(module)), copied, seal, masks, Asked(module))


def call(layer: MoE, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """One call in the model's own dtype and width."""
    weights = top_k_weights.float().contiguous()  # these are themselves where nothing is to do
    x = _padded(hidden_states.bfloat16().contiguous(), -1)
    y: Tensor = layer(x, top_k_index.contiguous(), weights)
    if y.shape != hidden_states.shape:
        y = y[:, : hidden_states.shape[-1]]
    return y.to(hidden_states.dtype)


def make_layer(
    module: nn.Module,
    top_k: int,
    recipe: str | None = None,
    backend: str = "auto",
    *,
    group: Any = None,
    num_ranks: int = 1,
    max_tokens_per_rank: int | None = None,
    cuda_graphs: bool | GraphPool = False,
) -> MoE:
    """The layer of a transformers experts module; BF16, FP8 and FP4 experts stay where they are."""
    _check_module(module)
    gate = gate_of(module)
    tensors = [getattr(module, name, None) for name in PARAMETERS]
    w13, w2, b13, b2, *scales = (t.detach() if isinstance(t, Tensor) else None for t in tensors)
    assert w13 is not None and w2 is not None
    if w13.dtype not in FLOATS:
        experts = _quantised(w13, w2, scales, gate)
        if recipe is not None and recipe != experts.recipe:
            own, wanted = (recipe_named(r).weights for r in (experts.recipe, recipe))
            if own is wanted:
                experts = replace(experts, recipe=recipe)
            else:
                experts = ExpertWeights.quantize(*experts.dequantize(), recipe)
    else:
        if getattr(module, "is_transposed", False):
            w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
        if w13.shape[1] % (2 * WIDTH_MULTIPLE) or w13.shape[2] % WIDTH_MULTIPLE:
            order, gate = gate.gate_up, gate._replace(gate_up="split")
            w13 = _padded(_padded(checkpoint.gate_then_up(w13, order), -2).flatten(1, 2), -1)
            w2 = _padded(_padded(w2, -1), -2)
            if b13 is not None and b2 is not None:
                b13 = checkpoint.gate_then_up(b13[..., None], order)[..., 0]
                b13, b2 = _padded(b13, -1).flatten(1), _padded(b2, -1)
        if recipe in (None, "bf16"):
            experts = ExpertWeights.from_quantized(
                w13.bfloat16(), None, w2.bfloat16(), None, recipe="bf16", gate_up=gate.gate_up,
                b13=b13, b2=b2,
            )  # fmt: skip
        else:
            experts = ExpertWeights.quantize(
                w13, w2, str(recipe), gate_up=gate.gate_up, b13=b13, b2=b2
            )
    return MoE(
        experts, experts.num_experts * num_ranks, top_k, activation=gate.activation,
        clamp=gate.clamp, weight_at="combine", backend=backend, group=group,
        max_tokens_per_rank=max_tokens_per_rank, cuda_graphs=cuda_graphs,
    )  # fmt: skip


def _quantised(w13: Tensor, w2: Tensor, scales: list[Tensor | None], gate: Gate) -> ExpertWeights:
    """FP8Experts of transformers: FP8 in blocks of 128 or a scale per matrix, or packed FP4."""
    s13, s2 = scales
    assert s13 is not None and s2 is not None
    if w13.dtype != torch.float8_e4m3fn:
        codes = (s if s.dtype == torch.float8_e8m0fnu else e8m0_codes(s) for s in (s13, s2))
        return ExpertWeights.from_quantized(
            w13, next(codes), w2, next(codes), gate_up=gate.gate_up,
            recipe=recipe_on("w4a8", backends.arch_of(w13.device)),
        )  # fmt: skip
    num, rows, hidden = w13.shape
    wide = [-(-size // FP8_BLOCK) for size in (rows // 2, hidden)]
    if s13.shape[1:] == (2, 1) and s2.shape[1:] == (1, 1):  # one scale per matrix
        s13 = s13.float()[..., None].expand(num, 2, *wide).flatten(1, 2)
        s2 = s2.float().expand(num, wide[1], wide[0])
    require(
        tuple(s13.shape) == (num, 2 * wide[0], wide[1])
        and tuple(s2.shape) == (num, wide[1], wide[0]),
        f"FP8 experts must have a scale per {FP8_BLOCK} x {FP8_BLOCK} or per matrix, gate and up "
        "none in common",
        got=f"scales {tuple(s13.shape)} and {tuple(s2.shape)} for {tuple(w13.shape)}",
        kind=NotAvailable,
    )
    return ExpertWeights.from_quantized(w13, s13, w2, s2, recipe="w8a8", gate_up=gate.gate_up)


def _padded(t: Tensor, dim: int) -> Tensor:
    """`t` with zeros up to the next multiple of 32 of one dimension; or itself."""
    spare = -t.shape[dim] % WIDTH_MULTIPLE
    return nn.functional.pad(t, (0, 0) * (-1 - dim) + (0, spare)) if spare else t


def _check_module(module: nn.Module) -> None:
    name = type(module).__name__
    for flag, wanted, why in (
        ("has_gate", True, "experts must have a gate"),
        ("has_post_expert_norm", False, "experts must not be normalised before they are added"),
    ):
        require(
            getattr(module, flag, wanted) == wanted,
            why,
            got=name,
            fix='use experts_implementation="eager" for this model',
            kind=NotAvailable,
        )
    for attribute in PARAMETERS[:2]:
        t = getattr(module, attribute, None)
        require(
            isinstance(t, Tensor) and t.ndim == 3,
            f"experts must keep {attribute} as one tensor [experts, rows, columns]",
            got=f"{name} with {type(t).__name__} {tuple(getattr(t, 'shape', ()))}",
            kind=ShapeError,
        )
        assert isinstance(t, Tensor)
        scale = getattr(module, f"{attribute}_scale_inv", None)
        is_known = t.dtype in (torch.float8_e4m3fn, torch.int8) and isinstance(scale, Tensor)
        require(
            t.dtype in FLOATS or (is_known and not getattr(module, "is_transposed", False)),
            f"experts must keep {attribute} in bfloat16, float32 or float16, or FP8 or packed FP4 "
            f"with {attribute}_scale_inv",
            got=f"{name} in {t.dtype}, quantised: its scales would be left out",
            fix="load the model unquantised",
            kind=DTypeError,
        )


def _places(module: nn.Module) -> tuple[Any, ...]:
    """Changes when a parameter is replaced, moved or cast."""
    tensors = (getattr(module, name, None) for name in PARAMETERS)
    return tuple(
        (StorageWeakRef(t.untyped_storage()), t.data_ptr(), t.dtype, t.device)
        for t in tensors  # under expert parallelism they are new aliases in every call
        if isinstance(t, Tensor)
    )


def _copied(module: nn.Module, layer: MoE) -> tuple[str, ...]:
    """The parameters that the layer copied; what it shares cannot be out of date."""
    held = {t.data_ptr() for t in layer.weights.state_dict().values()}
    tensors = {name: getattr(module, name, None) for name in PARAMETERS}
    return tuple(
        n for n, t in tensors.items() if isinstance(t, Tensor) and t.data_ptr() not in held
    )


def _interfaces() -> list[Any]:
    """Those of plain experts and, in newer releases, of quantised ones."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise NotAvailable(
            f"the experts interface of transformers 5 must be there; got {error}; "
            "pip install 'transformers>=5.7'"
        ) from error
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    except ImportError:
        return [ALL_EXPERTS_FUNCTIONS]
    return [ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS]


def _ep_interface() -> tuple[Any, Any] | None:
    """That of expert parallelism and its base class; None before transformers 5.23."""
    try:
        module: Any = importlib.import_module("transformers.distributed.expert_parallel")
        return module.EPImplementationInterface, module.EPImplementation
    except (ImportError, AttributeError):
        return None
