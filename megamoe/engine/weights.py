"""ExpertWeights: the experts of one rank in one recipe, checked once, moved and saved as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.engine import checkpoint, files, loader
from megamoe.engine.fingerprint import counted
from megamoe.engine.packed import PackedMatrix
from megamoe.errors import DeviceError, RangeError, ShapeError, one_of, require
from megamoe.formats.quantize import dequantize, quantize_into, weight_global_scale
from megamoe.formats.quantized import Quantized, empty
from megamoe.formats.spec import recipe_named
from megamoe.problem import check_even, check_width


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """E experts. `quantize` makes them from BF16, `from_quantized` from a checkpoint's tensors.

    recipe       "bf16", "w8a8", "w4a16", "w4a8", "w4a8_block", "w4a4", "nvfp4" or "nvfp4a16"
    w13          [E, 2, intermediate, hidden]: gate at 0, up at 1; a block never holds both
    w2           [E, hidden, intermediate]
    b13, b2      float32 [E, 2, intermediate] and [E, hidden], or None
    x_global     NVFP4: float32 scalar, the global scale that tokens are quantised with
    acts_global  NVFP4: float32 [E], the one of the activation's output
    gate_up      order of rows that the checkpoint had, "split" or "interleaved": here they are
                 apart, but a layer of "interleaved" ones warns of the activation "swiglu"

    What a Hopper GPU first calls with FP4 experts packs them, and the canonical bytes go: from then
    on `w13` and `w2` unpack what is asked of them, exactly (docs/hopper.md, one copy).
    """

    recipe: str
    w13: Quantized
    w2: Quantized
    b13: Tensor | None = None
    b2: Tensor | None = None
    x_global: Tensor | None = None
    acts_global: Tensor | None = None
    gate_up: str = "split"

    def __post_init__(self) -> None:
        fmt = recipe_named(self.recipe).weights
        one_of(self.gate_up, checkpoint.GATE_UP, "gate_up")
        for name in ("w13", "w2"):
            part = getattr(self, name)
            require(
                isinstance(part, Quantized) and part.format == fmt.name,
                f"{name} must be a Quantized in {fmt.name} for recipe {self.recipe}",
                got=getattr(part, "format", type(part).__name__),
                kind=RangeError,
            )
        require(
            len(self.w13.shape) == 4 and self.w13.shape[1] == 2,
            "w13 must be [E, 2, intermediate, hidden]",
            got=self.w13.shape,
            kind=ShapeError,
        )
        num_experts, _, intermediate, hidden = self.w13.shape
        check_width("hidden", hidden)
        check_width("intermediate", intermediate)
        require(num_experts >= 1, "there must be at least one expert", got=0, kind=ShapeError)
        require(
            self.w2.shape == (num_experts, hidden, intermediate),
            f"w2 must be [E, hidden, intermediate] = {(num_experts, hidden, intermediate)}",
            got=self.w2.shape,
            kind=ShapeError,
        )
        wanted = {"b13": (num_experts, 2, intermediate), "b2": (num_experts, hidden)}
        if recipe_named(self.recipe).acts.has_global:
            wanted |= {"x_global": (), "acts_global": (num_experts,)}
        for name in ("b13", "b2", "x_global", "acts_global"):
            checkpoint.check_extra(
                getattr(self, name), name, wanted.get(name), required="global" in name
            )
        devices = {t.device for t in self.held().values()}
        require(
            len(devices) == 1,
            "all tensors of the experts must lie on one device",
            got=sorted(map(str, devices)),
            fix="move them with .to(device)",
            kind=DeviceError,
        )
        for name in ("w13", "w2"):
            part = getattr(self, name)
            if not isinstance(part, PackedMatrix):
                tensors = {k: _plain(t, dense=k != "data") for k, t in part.tensors().items()}
                if any(tensors[k] is not t for k, t in part.tensors().items()):
                    object.__setattr__(self, name, replace(part, **tensors))
        for name in ("b13", "b2", "x_global", "acts_global"):
            if (t := getattr(self, name)) is not None:
                object.__setattr__(self, name, _plain(t, dense=True))

    # -- making --------------------------------------------------------------------------------

    @classmethod
    def quantize(
        cls,
        w13: Tensor,
        w2: Tensor,
        recipe: str,
        *,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        gate_up: str = "split",
        x_global: float = 1.0,
        acts_global: float | Tensor = 1.0,
        progress: Callable[[int], None] | None = None,
    ) -> ExpertWeights:
        """Quantise BF16 (or FP32, FP16) weights [E, 2I, H] and [E, H, I], expert by expert.

        w13       [E, 2I, H]: the first linear, gate and up
        w2        [E, H, I]: the second linear
        b13, b2   biases [E, 2I] and [E, H], or None
        gate_up   "split": all gate rows, then all up rows; "interleaved": gate, up, gate, up, ...
        x_global, acts_global   NVFP4 only: calibrated global scales of tokens and activations
        progress  called with the number of experts done
        Needs little memory beside input and output: values are quantised about a million at a time.
        """
        checkpoint.check_source(w13, "w13", 3)
        checkpoint.check_source(w2, "w2", 3)
        require(
            len(w13) == len(w2),
            "w13 and w2 must have as many experts",
            got=f"{len(w13)} and {len(w2)}",
            kind=ShapeError,
        )
        extras = checkpoint.extras(
            recipe, len(w13), b13, b2, gate_up, x_global, acts_global, w13.device
        )
        pairs = zip(w13, w2, strict=True)
        weights = cls.quantize_each(pairs, len(w13), recipe, gate_up=gate_up, progress=progress)
        return replace(weights, **extras)  # type: ignore[arg-type]

    @classmethod
    def quantize_each(
        cls,
        experts: Iterable[tuple[Tensor, Tensor]],
        num_experts: int,
        recipe: str,
        *,
        gate_up: str = "split",
        progress: Callable[[int], None] | None = None,
    ) -> ExpertWeights:
        """Quantise experts as they come; the BF16 layer need not exist.

        experts      a pair of both linears' weights for each, [2I, H] and [H, I]
        num_experts  how many pairs there are
        """
        one_of(gate_up, checkpoint.GATE_UP, "gate_up")
        fmt = recipe_named(recipe).weights
        weights: ExpertWeights | None = None
        done = 0
        for w13, w2 in experts:
            shape = None if weights is None else (2 * weights.intermediate, weights.hidden)
            checkpoint.check_pair(w13, w2, shape)
            if weights is None:
                weights = _empty(recipe, num_experts, w13.shape[0] // 2, w13.shape[1], w13.device)
            require(
                done < num_experts,
                f"there must be {num_experts} experts",
                got="more",
                kind=ShapeError,
            )
            part = weights[done : done + 1]
            for name, out in (("w13", part.w13), ("w2", part.w2)):
                source = w13.detach() if name == "w13" else w2.detach()
                source = checkpoint.gate_then_up(source, gate_up) if name == "w13" else source
                source = source.unsqueeze(0)
                if out.global_scale is not None:
                    out.global_scale.copy_(weight_global_scale(source))
                quantize_into(source, out)
                checkpoint.refuse_nan(out, name, first_expert=done)
            done += 1
            if progress is not None:
                progress(done)
        require(
            weights is not None and done == num_experts,
            f"there must be {num_experts} experts in {fmt.name}",
            got=done,
            kind=ShapeError,
        )
        assert weights is not None
        return replace(weights, gate_up=gate_up)

    @classmethod
    def from_quantized(
        cls,
        w13_data: Tensor,
        w13_scale: Tensor | None,
        w2_data: Tensor,
        w2_scale: Tensor | None,
        *,
        recipe: str,
        w13_global: Tensor | None = None,
        w2_global: Tensor | None = None,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        gate_up: str = "split",
        x_global: float = 1.0,
        acts_global: float | Tensor = 1.0,
        scales: str | None = None,
    ) -> ExpertWeights:
        """Take a checkpoint's tensors as they are, experts stacked in front; nothing is rounded.

        w13_data, w13_scale      values and scales of gate and up, in the checkpoint's own shapes
        w2_data, w2_scale        of down
        w13_global, w2_global    NVFP4: float32 global scales of the weights
        x_global, acts_global    NVFP4: global scales of tokens and of the activation's output

        DeepSeek-V3  w8a8: float8_e4m3fn [E, 2I, H], float32 [E, 2 ceil(I/128), ceil(H/128)]
                     (weight_scale_inv of gate, then of up); E8M0 scales are taken by value
        DeepSeek-V4  w4*: int8 or uint8 [E, 2I, H/2], float8_e8m0fnu [E, 2I, H/32]
        gpt-oss      w4*: uint8 blocks [E, 2I, H/32, 16], uint8 scales [E, 2I, H/32],
                     gate_up="interleaved", b13 and b2
        NVFP4        uint8 [E, 2I, H/2], float8_e4m3fn [E, 2I, H/16], w13_global [E] or [E, 2],
                     w2_global [E]; value = element * scale * global (modelopt's weight_scale_2)

        scales  "divide": FP32 scales are stored as reciprocals, NVFP4's global ones
                (weight_global_scale of compressed-tensors) or FP8's; "multiply": they are not,
                however large; None: they are not, and those that would make weights above
                2688 are refused
        """
        fmt = recipe_named(recipe).weights
        w13 = checkpoint.read_matrix(
            w13_data, w13_scale, w13_global, fmt, "w13", gate_up=gate_up, scales=scales
        )
        w2 = checkpoint.read_matrix(w2_data, w2_scale, w2_global, fmt, "w2", scales=scales)
        extras = checkpoint.extras(
            recipe, len(w13), b13, b2, gate_up, x_global, acts_global, w13.device, scales
        )
        return cls(recipe, w13, w2, **extras, gate_up=gate_up)

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path,
        layer: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        recipe: str | None = None,
        prefix: str | None = None,
        device: torch.device | str = "cpu",
        progress: Callable[[int], None] | bool = False,
    ) -> ExpertWeights:
        """One rank's experts of a layer of a Hugging Face folder, read one by one.

        folder    with config.json and safetensors files
        layer     its number in the names of the tensors
        recipe    None: picked from how they are stored; `mm.Checkpoint(folder).picked(layer)` says
                  which, and the activation and clamp of the model (docs/checkpoints.md)
        prefix    of the names of its experts, where a layer has several; None is the model's own
        progress  True: a bar; or a function, called with the number of experts read
        """
        checkpoint = loader.Checkpoint(folder)
        return checkpoint.experts(
            layer, rank=rank, num_ranks=num_ranks, recipe=recipe, prefix=prefix, device=device,
            progress=progress,
        )  # fmt: skip

    # -- using ---------------------------------------------------------------------------------

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        return self.w13.shape[3]

    @property
    def intermediate(self) -> int:
        return self.w13.shape[2]

    @property
    def device(self) -> torch.device:
        return self.w13.device

    @property
    def is_packed(self) -> bool:
        """Whether the experts are held as Hopper's images."""
        return isinstance(self.w13, PackedMatrix)

    @property
    def nbytes(self) -> int:
        """Bytes that are held: values or images, scales, biases."""
        return sum(t.numel() * t.element_size() for t in self.held().values())

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """FP32 weights [E, 2I, H] (gate rows, then up rows) and [E, H, I]."""
        plain = self.canonical()
        return dequantize(plain.w13).flatten(1, 2), dequantize(plain.w2)

    def to(self, device: torch.device | str) -> ExpertWeights:
        """The same experts on `device`; images stay images on another GPU."""
        return self._each(lambda part: part.to(device))

    def canonical(self, device: torch.device | str | None = None) -> ExpertWeights:
        """The same experts in the layout of their format: unpacked exactly, or as they are.

        device  where to; None: where they lie
        """

        def plain(part: Quantized | Tensor) -> Quantized | Tensor:
            if isinstance(part, PackedMatrix):
                return part.plain(device)
            return part if device is None else part.to(device)

        return self._each(plain) if self.is_packed or device is not None else self

    def __getitem__(self, idx: slice) -> ExpertWeights:
        """A run of experts, as views; with a step as a copy, since kernels read dense tensors."""
        require(isinstance(idx, slice), "experts are picked by a slice", got=idx, kind=RangeError)
        picked = range(*idx.indices(self.num_experts))
        require(
            len(picked) >= 1, "the slice must hold at least one expert", got=idx, kind=RangeError
        )
        if picked.step > 1:
            return self.take(picked)
        parts: dict[str, Any] = {"w13": self.w13[idx], "w2": self.w2[idx]}
        for name in ("b13", "b2", "acts_global"):
            if getattr(self, name) is not None:
                parts[name] = getattr(self, name)[idx]
        return replace(self, **parts)

    def for_rank(self, rank: int, num_ranks: int) -> ExpertWeights:
        """The experts of one rank: the rank-th of num_ranks equal runs, as views."""
        check_even(self.num_experts, num_ranks)
        require(
            0 <= rank < num_ranks,
            f"rank must lie between 0 and {num_ranks - 1}",
            got=rank,
            kind=RangeError,
        )
        per_rank = self.num_experts // num_ranks
        return self[rank * per_rank : (rank + 1) * per_rank]

    def take(self, experts: Sequence[int]) -> ExpertWeights:
        """Some experts in any order, copied: those of one rank under a placement.

        experts  their numbers, in the order wanted
        """
        require(
            all(isinstance(e, int) and 0 <= e < self.num_experts for e in experts),
            f"experts must be numbers from 0 to {self.num_experts - 1}",
            got=list(experts)[:16],
            kind=RangeError,
        )
        return self.cat([self[e : e + 1] for e in experts])

    @classmethod
    def cat(cls, parts: Sequence[ExpertWeights]) -> ExpertWeights:
        """All experts of `parts`, in order; the parts agree in all but the number of experts."""
        require(len(parts) >= 1, "there must be at least one part", got=0, kind=ShapeError)
        parts = [part.canonical() for part in parts]
        names = [set(part.state_dict()) for part in parts]
        agree = all(
            (p.recipe, p.hidden, p.intermediate)
            == (parts[0].recipe, parts[0].hidden, parts[0].intermediate)
            and (p.x_global is None or torch.equal(p.x_global, parts[0].x_global))  # type: ignore[arg-type]
            for p in parts
        )
        require(
            agree and all(n == names[0] for n in names),
            "parts must have one recipe, one shape, the same biases and one x_global",
            got=[(p.recipe, p.hidden, p.intermediate) for p in parts],
            kind=ShapeError,
        )
        tensors = {
            name: first if first.ndim == 0 else torch.cat([p.state_dict()[name] for p in parts])
            for name, first in parts[0].state_dict().items()
        }
        whole = cls.from_state_dict(tensors, parts[0].recipe)
        return replace(whole, gate_up=parts[0].gate_up)

    # -- keeping -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by name: "w13.data", "w13.scale", ..., "b2"; images are unpacked."""
        return self.held(unpacked=True)

    def held(self, *, unpacked: bool = False) -> dict[str, Tensor]:
        """Every tensor that is held by name: as `state_dict`, or "w13.image", ..., of images.

        unpacked  the canonical tensors of images, as `state_dict` has them
        """
        tensors: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Quantized):
                is_image = isinstance(value, PackedMatrix) and not unpacked
                mine = value.held() if is_image else value.tensors()  # type: ignore[attr-defined]
                tensors |= {f"{field.name}.{name}": t for name, t in mine.items()}
            elif isinstance(value, Tensor):
                tensors[field.name] = value
        return tensors

    def _replace_parts(self, **parts: Quantized) -> None:
        """Hold the same values in another way from now on: what was held goes."""
        for name, part in parts.items():
            object.__setattr__(self, name, part)

    @classmethod
    def from_state_dict(cls, tensors: dict[str, Tensor], recipe: str) -> ExpertWeights:
        """The inverse of `state_dict`."""
        fmt = recipe_named(recipe).weights
        parts: dict[str, Any] = {}
        for name, t in tensors.items():
            head, _, tail = name.partition(".")
            if tail:
                parts.setdefault(head, {})[tail] = t
            else:
                parts[head] = t
        known = {field.name for field in fields(cls)} - {"recipe", "gate_up"}
        require(
            {"w13", "w2"} <= set(parts) <= known
            and all("data" in parts[name] for name in ("w13", "w2")),
            f"the tensors must be those of an ExpertWeights in {recipe}",
            got=sorted(tensors),
            kind=ShapeError,
        )
        for name in ("w13", "w2"):
            part = parts[name]
            shape = tuple(part["data"].shape)
            if fmt.element.bits == 4:
                shape = (*shape[:-1], 2 * shape[-1])
            parts[name] = Quantized(
                part["data"], part.get("scale"), fmt.name, shape, part.get("global_scale")
            )
        return cls(recipe, **parts)

    @classmethod
    def empty(
        cls,
        recipe: str,
        num_experts: int,
        hidden: int,
        intermediate: int,
        device: torch.device | str | None = None,
    ) -> ExpertWeights:
        """Experts of these sizes, all zero, to be loaded into.

        num_experts  that these weights hold: over ranks, one rank's
        device       where they lie, "meta" too; None: torch's default device
        """
        where = torch.get_default_device() if device is None else torch.device(device)
        weights = _empty(recipe, num_experts, intermediate, hidden, where)
        for t in (weights.w13.data, weights.w13.scale, weights.w2.data, weights.w2.scale):
            if t is not None:
                t.view(torch.uint8).zero_()
        return weights

    def __repr__(self) -> str:
        return (
            f"ExpertWeights({self.recipe}, {self.num_experts} experts, hidden={self.hidden}, "
            f"intermediate={self.intermediate}, {self.nbytes / 1e6:,.1f} MB "
            f"{'packed ' if self.is_packed else ''}on {self.device})"
        )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; an existing file is replaced only once the new one is whole."""
        files.save(path, self.canonical("cpu" if self.is_packed else None).held(), self.recipe)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> ExpertWeights:
        """Read what `save` wrote; a foreign or truncated file is refused."""
        tensors, recipe = files.load(path, device)
        for name, t in tensors.items():
            checkpoint.refuse_values(t, name, name)
        return cls.from_state_dict(tensors, recipe)

    def _each(self, change: Callable[[Any], Any]) -> ExpertWeights:
        """With every matrix and every other tensor changed."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        held = {k: v for k, v in values.items() if isinstance(v, Quantized | Tensor)}
        return replace(self, **{k: change(v) for k, v in held.items()})


def _plain(t: Tensor, *, dense: bool) -> Tensor:
    """A tensor as kernels read it and as writes to it are counted, without gradients."""
    t = t.contiguous() if dense else t
    return counted(t).detach() if t.requires_grad else counted(t)


def _empty(
    recipe: str, num_experts: int, intermediate: int, hidden: int, device: torch.device
) -> ExpertWeights:
    """Uninitialised experts, to be filled."""
    fmt = recipe_named(recipe).weights

    check_width("hidden", hidden)
    check_width("intermediate", intermediate)
    cpu = torch.device("cpu")  # where values can be checked, whatever the device
    extras = checkpoint.extras(recipe, num_experts, None, None, "split", 1.0, 1.0, cpu)
    on_device: dict[str, Any] = {name: t.to(device) for name, t in extras.items()}
    return ExpertWeights(
        recipe,
        empty((num_experts, 2, intermediate, hidden), fmt, device),
        empty((num_experts, hidden, intermediate), fmt, device),
        **on_device,
    )
