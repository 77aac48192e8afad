"""Checkpoint: the experts of a Hugging Face folder, a layer and an expert at a time.

Which tensors there are says how experts are stored, config.json what their gate computes. Nothing
is guessed: a name, dtype, activation or order of rows that is not in the tables here and in
model_config.py is refused, and so is what config.json and the tensors say differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.engine import checkpoint, model_config, stored
from megamoe.engine.backends import arch_of
from megamoe.engine.shards import Shards, read_json
from megamoe.engine.stored import KINDS, Stored
from megamoe.errors import DTypeError, FileError, NotAvailable, RangeError, ShapeError, require
from megamoe.formats.quantized import Quantized, empty
from megamoe.formats.spec import recipe_named, recipe_on
from megamoe.problem import check_width

if TYPE_CHECKING:
    from megamoe.engine.images import Packing
    from megamoe.engine.weights import ExpertWeights

# Of an expert's linears. w1, w3, w2: Mixtral, DeepSeek-V4; the others: all else.
LINEARS = {
    "gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2"),
}  # fmt: skip
VALUES = ("weight", "weight_packed")
SCALES = ("weight_scale_inv", "weight_scale", "scale")  # all multiply, "inv" too
GLOBALS = {"weight_scale_2": "multiply", "weight_global_scale": "divide"}
INPUTS = {"input_scale": "multiply", "input_global_scale": "divide"}
LEFT_OUT = ("weight_shape",)  # says nothing that the tensors do not
# Where the experts of a layer are one tensor: values and scales of gate and up, and of down.
FUSED = {"_blocks": "_scales", "": "_scale_inv", ".weight": ".weight_scale_inv"}
COUNTS = (
    "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts",
)  # fmt: skip
TOP_KS = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k")


@dataclass(frozen=True, slots=True)
class Picked:
    """What was found out about one layer's experts. `str` says it in a line.

    activation, clamp   for `mm.moe` and `mm.MoE`
    gate_up             order of rows in the checkpoint, "split" or "interleaved"
    weights_multiply    what routing weights multiply, "outputs" of experts or "tokens" (Llama 4):
                        then `layer(x * weights, idx, ones)` for one expert a token
    """

    layer: int
    prefix: str  # of the names of its experts
    num_experts: int
    top_k: int | None
    hidden: int
    intermediate: int
    stored: str
    recipe: str
    activation: str
    clamp: float | None
    gate_up: str
    has_bias: bool
    weights_multiply: str = "outputs"

    def __str__(self) -> str:
        clamp = "" if self.clamp is None else f" clamped at {self.clamp:g}"
        bias = ", biases" if self.has_bias else ""
        tokens = ", routing weights multiply tokens" if self.weights_multiply == "tokens" else ""
        return (
            f"layer {self.layer}: {self.num_experts} experts {self.hidden} x {self.intermediate} "
            f"stored as {KINDS[self.stored].about}{bias} -> recipe {self.recipe}, "
            f"{self.activation}{clamp}, gate and up {self.gate_up}{tokens}"
        )


class Checkpoint:
    """A Hugging Face folder: which experts it has, how they are stored, and the experts.

    folder  with config.json and safetensors files; opening it reads no tensor
    """

    def __init__(self, folder: str | Path) -> None:
        require(
            isinstance(folder, str | Path), "a checkpoint is a folder, by its path",
            got=repr(folder), kind=DTypeError,
        )  # fmt: skip
        self.shards = Shards(folder)
        config = self.shards.folder / "config.json"
        require(config.is_file(), "the folder must hold config.json", got=config, kind=FileError)
        read = read_json(config)
        self.config: dict[str, Any] = {**read, **(read.get("text_config") or {})}
        self._names: dict[int, dict[str, list[str]]] = {}
        wanted = re.compile(r"((?:.*\.)?layers\.(\d+)\.(?:\w+\.)*experts\.)(.+)")
        for name in self.shards.names:
            match = wanted.fullmatch(name)
            if match:
                prefix, layer, rest = match.groups()
                self._names.setdefault(int(layer), {}).setdefault(prefix, []).append(rest)

    @property
    def layers(self) -> list[int]:
        """The layers that have experts; those that predict further tokens alone are left out."""
        return sorted(n for n, prefixes in self._names.items() if _of_body(prefixes))

    def picked(
        self, layer: int, recipe: str | None = None, prefix: str | None = None, *,
        device: torch.device | str = "cpu",
    ) -> Picked:  # fmt: skip
        """How a layer's experts are stored, and what they need to run.

        layer   its number in the names of the tensors
        recipe  that they are to have; None is picked from how they are stored, and the device
        prefix  of the names of its experts ("mtp.layers.0.mlp.experts."); None is the model's own
        """
        prefix = self._prefix(layer, prefix)
        names = self._names[layer][prefix]
        is_fused = not any(name[0].isdigit() for name in names)
        _refuse_unknown(prefix, names, is_fused)
        model_config.refuse_rotations(self.config)
        model_config.refuse_layer_clamps(self.config, layer)
        activation, clamp = model_config.activation_of(self.config)
        gate_up = model_config.gate_up_of(self.config, prefix, is_fused)
        num_experts = self._count(prefix, names, is_fused)
        gate, _, down = self._matrices(prefix, names, 0, gate_up)
        intermediate, hidden = gate.shape
        require(
            down.shape == (hidden, intermediate),
            "gate must be [intermediate, hidden] and down [hidden, intermediate]",
            got=f"{gate.shape} and {down.shape}",
            kind=ShapeError,
        )
        model_config.check_widths(self.config, prefix, hidden, intermediate)
        recipe = recipe or recipe_on(self._recipe(gate.kind), arch_of(torch.device(device)))
        recipe_named(recipe)
        return Picked(
            layer, prefix, num_experts, self._first_of(TOP_KS), hidden, intermediate, gate.kind,
            recipe, activation, clamp, gate_up, any(name.endswith("bias") for name in names),
            model_config.weights_multiply(self.config),
        )  # fmt: skip

    def experts(
        self,
        layer: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        recipe: str | None = None,
        prefix: str | None = None,
        device: torch.device | str = "cpu",
        progress: Callable[[int], None] | bool = False,
    ) -> ExpertWeights:
        """The experts of one rank, read one by one.

        layer     its number in the names of the tensors
        recipe    None is the one that is picked, for the device
        prefix    as for `picked`
        progress  True: a bar on standard error, after a line that says what was picked; or a
                  function, called with the number of experts read
        Bytes are taken as they are where the recipe stores weights as the checkpoint does, else the
        values are rounded to it. On the host there is one expert at a time beside the result, and
        FP4 on a Hopper GPU is packed as it comes: one more expert there (docs/hopper.md).
        """
        from megamoe.engine.weights import ExpertWeights

        picked = self.picked(layer, recipe, prefix, device=device)
        require(
            num_ranks >= 1 and picked.num_experts % num_ranks == 0 and 0 <= rank < num_ranks,
            f"{picked.num_experts} experts must divide evenly over ranks",
            got=f"rank {rank} of {num_ranks}",
            kind=RangeError,
        )
        per_rank = picked.num_experts // num_ranks
        numbers = range(rank * per_rank, (rank + 1) * per_rank)
        where = torch.device(device)
        names = self._names[layer][picked.prefix]
        x_global = None  # other recipes have no use for input scales, whatever they are
        if recipe_named(picked.recipe).acts.has_global:
            x_global = self._x_global(picked.prefix, names, picked.num_experts)
        out = _Made(picked, len(numbers), where)
        with _bar(progress, picked, len(numbers)) as advance:
            for slot, expert in enumerate(numbers):
                out.put(slot, expert, self._matrices(picked.prefix, names, expert, picked.gate_up))
                if picked.has_bias:
                    out.put_bias(slot, self._biases(picked.prefix, names, expert, picked.gate_up))
                advance(slot + 1)
        extras: dict[str, Any] = out.biases
        if x_global is not None:
            extras |= {"x_global": x_global.to(where), "acts_global": out.acts_global}
        return ExpertWeights(picked.recipe, **{**out.matrices(), **extras}, gate_up=picked.gate_up)

    # -- config ----------------------------------------------------------------------------------

    def _prefix(self, layer: int, prefix: str | None) -> str:
        """That of a layer's experts: the one that was asked for, or the model's own."""
        prefixes = self._names.get(layer, {})
        wanted = (
            _of_body(prefixes) if prefix is None else [one for one in prefixes if one == prefix]
        )
        require(
            bool(wanted),
            "the layer must have experts" + ("" if prefix is None else f" under {prefix}"),
            got=f"layer {layer} with {sorted(prefixes)}; those with experts: {_runs(self.layers)}",
            kind=RangeError,
        )
        require(
            len(wanted) == 1, "a layer must have experts under one prefix", got=sorted(wanted),
            fix="say which: prefix=", kind=FileError,
        )  # fmt: skip
        return wanted[0]

    def _recipe(self, kind: str) -> str:
        is_v4 = str(self.config.get("model_type", "")).startswith("deepseek_v4")
        if kind == "mxfp4" and is_v4:
            return "w4a8"
        if kind == "nvfp4" and model_config.has_bf16_inputs(self.config, self.shards.folder):
            return "nvfp4a16"
        return KINDS[kind].recipe

    def _first_of(self, keys: tuple[str, ...]) -> int | None:
        values = [self.config[key] for key in keys if isinstance(self.config.get(key), int)]
        return values[0] if values else None

    def _count(self, prefix: str, names: list[str], is_fused: bool) -> int:
        """How many experts there are; the config and the tensors must agree."""
        wanted = self._first_of(COUNTS)
        if is_fused:
            values = next((n for n in names if n.startswith("down_proj") and "bias" not in n), None)
            num = self.shards.entry(prefix + (values or "down_proj")).shape[0]
        else:
            numbers = {int(name.split(".")[0]) for name in names}
            num = len(numbers)
            require(
                wanted is not None,
                f"config.json must say how many experts there are: one of {', '.join(COUNTS)}",
                got=f"none; {prefix}* has {num}", fix="write it there", kind=FileError,
            )  # fmt: skip
            require(
                numbers == set(range(num)), f"{prefix}* must be numbered from 0 on",
                got=sorted(numbers), fix="a shard may be missing", kind=FileError,
            )  # fmt: skip
        require(
            wanted in (None, num), f"{prefix}* must be the {wanted} experts of config.json",
            got=num, fix="a shard may be missing", kind=FileError,
        )  # fmt: skip
        return num

    # -- tensors ---------------------------------------------------------------------------------

    def _matrices(
        self, prefix: str, names: list[str], expert: int, gate_up: str
    ) -> tuple[Stored, Stored, Stored]:
        """Gate, up and down of one expert."""
        if any(name[0].isdigit() for name in names):
            known = set(names)
            gate, up, down = (self._linear(prefix, known, expert, role) for role in LINEARS)
            require(
                gate.kind == up.kind == down.kind and gate.shape == up.shape,
                "gate, up and down of an expert must be stored alike",
                got=f"{gate.kind} {gate.shape}, {up.kind} {up.shape}, {down.kind}",
                kind=ShapeError,
            )
            return gate, up, down
        both = self._fused(prefix, names, expert, "gate_up_proj")
        return *both.halves(gate_up), self._fused(prefix, names, expert, "down_proj")

    def _linear(self, prefix: str, known: set[str], expert: int, role: str) -> Stored:
        linears = [n for n in LINEARS[role]
                   if any(f"{expert}.{n}.{values}" in known for values in VALUES)]  # fmt: skip
        _refuse_two([f"{prefix}{expert}.{n}" for n in linears])
        head = f"{expert}.{(linears or LINEARS[role])[0]}."

        def part(suffixes: Sequence[str]) -> tuple[str, Tensor | None]:
            there = [suffix for suffix in suffixes if head + suffix in known]
            _refuse_two([prefix + head + suffix for suffix in there])
            return (there[0], self.shards.read(prefix + head + there[0])) if there else ("", None)

        _, data = part(VALUES)
        if data is None:
            data = self.shards.read(f"{prefix}{head}weight")  # refuses by name
        name, g = part(tuple(GLOBALS))
        one = stored.read(prefix + head[:-1], data, part(SCALES)[1], _factor(g, GLOBALS.get(name)))
        name, factor = part(tuple(INPUTS))
        return replace(one, input_scale=_factor(factor, INPUTS.get(name)))

    def _fused(self, prefix: str, names: list[str], expert: int, linear: str) -> Stored:
        """One expert out of a tensor of all of them."""
        for values, scales in FUSED.items():
            if linear + values in names:
                data = self.shards.read(prefix + linear + values, expert)
                scale = None
                if linear + scales in names:
                    scale = self.shards.read(prefix + linear + scales, expert)
                data = data.flatten(1) if values == "_blocks" else data
                if values != "_blocks" and model_config.is_gpt_oss(self.config):
                    data = data.T.contiguous()
                return stored.read(prefix + linear, data, scale, None)
        self.shards.entry(prefix + linear)  # refuses by name
        raise AssertionError

    def _biases(
        self, prefix: str, names: list[str], expert: int, gate_up: str
    ) -> tuple[Tensor, Tensor]:
        """float32 [2, I] and [H]."""
        if "gate_up_proj_bias" in names:
            b13 = self.shards.read(prefix + "gate_up_proj_bias", expert).float()
            b2 = self.shards.read(prefix + "down_proj_bias", expert).float()
            return checkpoint.gate_then_up(b13[:, None], gate_up)[..., 0], b2
        biases = []
        for linears in LINEARS.values():
            names_of = [f"{expert}.{one}.bias" for one in linears]
            name = next((n for n in names_of if n in names), names_of[0])
            biases.append(self.shards.read(prefix + name).float())
        return torch.stack(biases[:2]), biases[2]

    def _x_global(self, prefix: str, names: list[str], num_experts: int) -> Tensor:
        """NVFP4's global scale of tokens: the largest of all experts', 1 where there is none."""
        known, factors = set(names), []
        num_there = sum(name.rpartition(".")[2] in INPUTS for name in names)
        require(
            num_there in (0, len(LINEARS) * num_experts),
            f"gate, up and down of all experts must have an {' or '.join(INPUTS)}, or none",
            got=f"{num_there} under {prefix}*", kind=FileError,
            fix='recipe="nvfp4a16" needs none: tokens stay BF16',
        )  # fmt: skip
        for expert in range(num_experts):
            for linear in (*LINEARS["gate"], *LINEARS["up"]):
                for suffix, direction in INPUTS.items():
                    name = f"{expert}.{linear}.{suffix}"
                    if name in known:
                        factor = _factor(self.shards.read(prefix + name), direction)
                        factors.append(_checked(factor, prefix + name))
        return (
            torch.stack(factors).amax()
            if factors
            else torch.ones((), dtype=torch.float32, device="cpu")
        )


class _Made:
    """Experts on their way: allocated whole, filled one by one."""

    def __init__(self, picked: Picked, num: int, device: torch.device) -> None:
        check_width("hidden", picked.hidden)
        check_width("intermediate", picked.intermediate)
        fmt = recipe_named(picked.recipe).weights
        hidden, wide = picked.hidden, picked.intermediate
        self._packing = _packing(picked.recipe, num, device)
        num_held = num if self._packing is None else 1
        self.w13 = empty((num_held, 2, wide, hidden), fmt, device)
        if fmt.has_global:  # gate and up may have different ones
            ones = torch.ones(num_held, 2, dtype=torch.float32, device=device)
            w = self.w13
            self.w13 = Quantized(w.data, w.scale, w.format, w.shape, ones)
        self.w2 = empty((num_held, hidden, wide), fmt, device)
        self._has_acts_global = recipe_named(picked.recipe).acts.has_global
        self.acts_global = torch.ones(num, dtype=torch.float32, device=device)
        self.biases: dict[str, Tensor] = {}
        if picked.has_bias:
            self.biases = {
                "b13": torch.empty(num, 2, wide, dtype=torch.float32, device=device),
                "b2": torch.empty(num, hidden, dtype=torch.float32, device=device),
            }

    def put(self, slot: int, expert: int, matrices: tuple[Stored, Stored, Stored]) -> None:
        gate, up, down = matrices
        at = slot if self._packing is None else 0
        gate.put(_half(self.w13, at, 0), "gate", expert)
        up.put(_half(self.w13, at, 1), "up", expert)
        down.put(self.w2[at : at + 1], "down", expert)
        if self._packing is not None:
            self._packing.put(slot, w13=self.w13, w2=self.w2)
        if self._has_acts_global and down.input_scale is not None:
            self.acts_global[slot] = _checked(down.input_scale, f"down of expert {expert}")

    def matrices(self) -> dict[str, Quantized]:
        """w13 and w2 of all experts."""
        if self._packing is None:
            return {"w13": self.w13, "w2": self.w2}
        return self._packing.matrices()

    def put_bias(self, slot: int, biases: tuple[Tensor, Tensor]) -> None:
        for name, bias in zip(("b13", "b2"), biases, strict=True):
            into = self.biases[name][slot]
            require(
                bias.shape == into.shape and bool(bias.isfinite().all()),
                f"biases of an expert must be finite and {tuple(into.shape)}",
                got=f"{name} {tuple(bias.shape)} of expert {slot} of this rank", kind=ShapeError,
            )  # fmt: skip
            into.copy_(bias)


def _packing(recipe: str, num: int, device: torch.device) -> Packing | None:
    """Where experts are packed as they come: FP4 on a GPU whose backend is Hopper's."""
    from megamoe.engine import backends

    if recipe_named(recipe).weights.element.bits != 4 or device.type == "meta":
        return None
    if backends.resolve("auto", "auto", device).name != "hopper":
        return None
    from megamoe.engine.images import Packing

    return Packing(recipe, num, device)


@contextmanager
def _bar(
    progress: Callable[[int], None] | bool, picked: Picked, total: int
) -> Iterator[Callable[[int], object]]:
    """What to call with the number of experts done."""
    if not isinstance(progress, bool):
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress

    console = Console(stderr=True, quiet=not progress, soft_wrap=True)
    console.print(str(picked), markup=False, highlight=False)
    with Progress(BarColumn(), MofNCompleteColumn(), console=console) as bars:
        task = bars.add_task("", total=total)
        yield lambda done: bars.update(task, completed=done)


def _half(w13: Quantized, slot: int, half: int) -> Quantized:
    """Gate or up of one expert, [1, I, H], as views."""
    part = slice(slot, slot + 1)
    scale, g = (None if t is None else t[part, half] for t in (w13.scale, w13.global_scale))
    _, _, wide, hidden = w13.shape
    return Quantized(w13.data[part, half], scale, w13.format, (1, wide, hidden), g)


def _factor(value: Tensor | None, direction: str | None) -> Tensor | None:
    """A scalar that multiplies."""
    if value is None:
        return None
    value = value.float().reshape(-1)
    require(value.numel() == 1, "a global scale must be one number", got=value.numel(),
            kind=ShapeError)  # fmt: skip
    return value[0].reciprocal() if direction == "divide" else value[0]


def _checked(factor: Tensor | None, name: str) -> Tensor:
    """A scalar that tokens or activations are multiplied by."""
    assert factor is not None
    require(
        bool((factor > 0) & factor.isfinite()), f"input_scale must be positive and finite: {name}",
        got=float(factor), fix="this expert may have seen no token when inputs were calibrated; "
        'recipe="nvfp4a16" needs no input scales', kind=RangeError,
    )  # fmt: skip
    return factor


def _refuse_two(names: list[str]) -> None:
    """Refuse tensors of which one would have to be left out."""
    require(len(names) <= 1, "a matrix must have one of these", got=" and ".join(names),
            fix="which of them holds is not known", kind=NotAvailable)  # fmt: skip


def _refuse_unknown(prefix: str, names: list[str], is_fused: bool) -> None:
    """Every tensor beside the experts must be one that is read, or known to say nothing."""
    linears = [name for each in LINEARS.values() for name in each]
    tails = (*VALUES, *SCALES, *GLOBALS, *INPUTS, *LEFT_OUT, "bias")
    fused: set[str] = set()
    for linear in ("gate_up_proj", "down_proj"):
        stored_as = [tail for tail in FUSED if linear + tail in names]
        _refuse_two([prefix + linear + tail for tail in stored_as])
        fused |= {linear + "_bias"}
        fused |= {linear + tail for one in stored_as for tail in (one, FUSED[one])}
    for name in names:
        _, _, rest = name.partition(".")
        linear, _, tail = rest.partition(".")
        ok = name in fused if is_fused else linear in linears and tail in tails
        require(
            ok, "every tensor of the experts must be known", got=prefix + name,
            fix="this format is not built", kind=NotAvailable,
        )  # fmt: skip


def _of_body(prefixes: dict[str, list[str]]) -> list[str]:
    """Those of the model's own layers, not those that predict further tokens ("mtp.layers.0")."""
    return [one for one in prefixes if not any(part.startswith("mtp") for part in one.split("."))]


def _runs(numbers: list[int]) -> str:
    return f"{numbers[0]}..{numbers[-1]}" if numbers else "none"
