"""CallSpec: all that a plan depends on. Integers and words: no tensors, no device."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.errors import one_of
from megamoe.problem import Problem


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """Experts that see every token."""

    num: int
    recipe: str
    intermediate: int
    fits_e4m3: bool = True
    apart: str = ""  # why the routed experts' launches cannot have them too; "": they do


@dataclass(frozen=True, slots=True)
class CallSpec:
    """A call as its launches see it: the problem, and traits of weights, tokens and ranks.

    combine       rows on their way to combine, "bf16" or "fp8"
    fits_e4m3     w4a8_block: whether all weights times their scales are E4M3 values
    not_hopper    why the Hopper kernels cannot hold these weights exactly; "": they can
    is_quantized  tokens come in the recipe's format
    is_captured   the call is recorded in somebody's graph and no layer owns its counters
    local_ranks   ranks that one launch runs side by side on one GPU
    is_placed     experts lie in another order than by rank, or more than once
    max_tokens    over a process group: tokens per rank that all ranks plan the call for
    shared_tokens  over a process group: those that memory is shared for; None: max_tokens
    has_bias      the routed experts have biases
    is_certified  the machine has a certificate for the backend that `auto` needs one for
    """

    problem: Problem
    combine: str = "bf16"
    fits_e4m3: bool = True
    not_hopper: str = ""
    shared: SharedSpec | None = None
    is_quantized: bool = False
    is_captured: bool = False
    local_ranks: int = 1
    is_placed: bool = False
    max_tokens: int | None = None
    shared_tokens: int | None = None
    is_certified: bool = False
    has_bias: bool = False

    def __post_init__(self) -> None:
        one_of(self.combine, ("bf16", "fp8"), "combine")

    @property
    def is_group(self) -> bool:
        """Whether the ranks are processes."""
        return self.problem.num_ranks > self.local_ranks

    @property
    def num_shared(self) -> int:
        """Shared experts."""
        return 0 if self.shared is None else self.shared.num

    @property
    def joined(self) -> int:
        """Shared experts that are the last ones of the routed experts' launches."""
        return self.num_shared if self.shared is not None and not self.shared.apart else 0

    @property
    def fused_tokens(self) -> int:
        """Tokens per rank that fused launches are planned for."""
        tokens = self.problem.num_tokens
        return max(tokens, self.max_tokens or 0) if self.is_group else tokens
