"""MoE: the layer as a torch module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.engine import backends, faults
from megamoe.engine.functional import check_shared, check_tokens, run
from megamoe.engine.op import describe, moe_op
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import CapacityError, DTypeError, NotAvailable, ShapeError, require
from megamoe.formats.quantized import Quantized
from megamoe.problem import Options, check_top_k


class MoE(nn.Module):
    """A Mixture-of-Experts layer over the experts of one rank.

    weights              this rank's experts; `num_experts` counts over all ranks
    group                torch.distributed process group, or None for one rank
    max_tokens_per_rank  refuse larger calls (no token is ever dropped); None is no limit
    stats                int64 [E_local], added to by every call: tokens each local expert received

    Casts such as `.half()` leave the experts' bytes alone; `.to(device)` moves them.
    """

    stats: Tensor

    def __init__(
        self,
        weights: ExpertWeights,
        num_experts: int,
        top_k: int,
        *,
        group: Any = None,
        max_tokens_per_rank: int | None = None,
        activation: str = "swiglu",
        clamp: float | None = None,
        weight_at: str = "l1",
        combine: str = "bf16",
        shared: ExpertWeights | None = None,
        backend: str = "auto",
        mode: str = "auto",
    ) -> None:
        super().__init__()
        require(
            isinstance(weights, ExpertWeights),
            "weights must be an ExpertWeights",
            got=type(weights).__name__,
            kind=DTypeError,
        )
        require(
            group is None,
            f"megamoe {backends.__version__} runs one rank per layer",
            got="a process group",
            fix="leave group out; `megamoe run --ranks R` runs R ranks in one process",
            kind=NotAvailable,
        )
        require(
            num_experts == weights.num_experts,
            "num_experts must be the experts of all ranks, and one rank holds all of them",
            got=f"num_experts {num_experts} with weights of {weights.num_experts}",
            kind=ShapeError,
        )
        check_top_k(top_k, num_experts)
        require(
            max_tokens_per_rank is None or max_tokens_per_rank >= 0,
            "max_tokens_per_rank must not be negative",
            got=max_tokens_per_rank,
            kind=ShapeError,
        )
        self.options = Options(activation, clamp, weight_at, combine)
        self.num_experts, self.top_k = num_experts, top_k
        self.max_tokens_per_rank = max_tokens_per_rank
        self._wanted = (backend, mode)
        backends.resolve(backend, mode, weights.device)  # refuse before anything is built
        self.experts = _Held(weights)
        self.shared = None if shared is None else _Held(shared)
        self.register_buffer(
            "stats",
            torch.zeros(weights.num_experts, dtype=torch.int64, device=weights.device),
            persistent=False,
        )
        self._settle()

    @property
    def backend(self) -> str:
        """The backend of the device that the experts lie on."""
        return backends.resolve(*self._wanted, self.weights.device).name

    @property
    def weights(self) -> ExpertWeights:
        """The experts, where they lie now."""
        return self.experts.weights

    def forward(self, x: Tensor | Quantized, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """bf16 [T, H] (or Quantized), int [T, top_k], float32 [T, top_k] -> bf16 [T, H]."""
        if torch.compiler.is_compiling():
            assert isinstance(x, Tensor), "a compiled model passes BF16 tokens"
            tensors = [*self.experts.buffers(), *(self.shared.buffers() if self.shared else ())]
            return moe_op(
                x, topk_idx, topk_weights, tensors, self.stats, self._faults.word, self._what
            )
        weights = self.experts.weights
        shared = None if self.shared is None else self.shared.weights
        check_tokens(x, topk_idx, topk_weights, weights, self.num_experts)
        check_shared(shared, x, weights)
        require(
            topk_idx.shape[1] == self.top_k,
            f"topk_idx must be [T, {self.top_k}]",
            got=tuple(topk_idx.shape),
            kind=ShapeError,
        )
        limit = self.max_tokens_per_rank
        require(
            limit is None or x.shape[0] <= limit,
            f"a call may hold at most max_tokens_per_rank = {limit} tokens",
            got=x.shape[0],
            fix="split the batch or build the layer for more",
            kind=CapacityError,
        )
        with torch.no_grad():
            return run(
                self.backend, x, topk_idx, topk_weights, weights, self.options, shared,
                self._faults, self.stats,
            )  # fmt: skip

    def check(self) -> None:
        """Wait for the GPU and raise if any call so far had a bad expert id or weight."""
        self._faults.check(self.top_k)

    def _settle(self) -> None:
        """What depends on the device: where faults are kept, and what a compiled model passes."""
        weights, shared = self.weights, None if self.shared is None else self.shared.weights
        self._faults = faults.Faults(weights.device)
        self._what = describe(weights, shared, self.options, self.backend)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        super()._apply(fn, recurse)
        self._settle()
        return self

    def extra_repr(self) -> str:
        w = self.weights
        return (
            f"{w.recipe}, {w.num_experts} experts, top_k={self.top_k}, hidden={w.hidden}, "
            f"intermediate={w.intermediate}, backend={self.backend}, {w.nbytes / 2**20:.0f} MiB"
        )


class _Held(nn.Module):
    """ExpertWeights as buffers, so that a model's state_dict and device moves reach them."""

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        self._recipe = weights.recipe
        self._names = {name.replace(".", "_"): name for name in weights.state_dict()}
        for name, t in weights.state_dict().items():
            self.register_buffer(name.replace(".", "_"), t)
        self._weights: ExpertWeights | None = weights

    @property
    def weights(self) -> ExpertWeights:
        if self._weights is None:
            tensors = {name: self.get_buffer(key) for key, name in self._names.items()}
            self._weights = ExpertWeights.from_state_dict(tensors, self._recipe)
        return self._weights

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Held:
        """Follow moves between devices, never casts: the bytes are the weights."""

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        self._weights = None
        super()._apply(move, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._weights = None  # load_state_dict(assign=True) replaces the tensors
        super()._load_from_state_dict(*args, **kwargs)
