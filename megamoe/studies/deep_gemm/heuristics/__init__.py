"""Heuristics: one module per architecture with the same functions; tables with a reason column."""

from __future__ import annotations

from typing import Protocol

from megamoe.hardware import Hardware
from megamoe.planner.choice import Term
from megamoe.problem import Problem
from megamoe.studies.deep_gemm.choice import Picked, Role, Tiles
from megamoe.studies.deep_gemm.heuristics import blackwell, hopper


class Backend(Protocol):
    """What each heuristics module offers; `plan` asks nothing else of it."""

    @property
    def BLOCK_MS(self) -> tuple[int, ...]: ...  # token tiles that the kernels have
    @property
    def BLOCK_NS(self) -> tuple[int, ...]: ...  # weight tiles
    @property
    def BLOCK_KS(self) -> tuple[int, ...]: ...  # depths
    @property
    def CLUSTER(self) -> int: ...  # CTAs that must start together
    @property
    def SCALE_ALIGN(self) -> int: ...  # rows to which a block's scales are padded
    @property
    def WAVE_RULE(self) -> tuple[str, str]: ...  # (rule of `waves`, why)
    @property
    def DEAL(self) -> tuple[str, str]: ...  # (way of `deal`, why)

    def mma(self, problem: Problem) -> tuple[str, str]: ...

    def block_m(self, problem: Problem) -> Picked: ...

    def block_n(self, problem: Problem, hw: Hardware, num_sms: int, block_m: int) -> Picked: ...

    def block_k(self, problem: Problem, block_m: int) -> Picked: ...

    def check(self, problem: Problem, tiles: Tiles) -> None: ...

    def shared_memory(
        self, problem: Problem, tiles: Tiles
    ) -> tuple[tuple[Term, ...], tuple[Term, ...]]: ...

    def roles(self, problem: Problem, tiles: Tiles) -> tuple[Role, ...]: ...


BACKENDS: dict[str, Backend] = {"hopper": hopper, "blackwell": blackwell}
BY_ARCH = {"sm_90a": "hopper", "sm_100a": "blackwell", "sm_103a": "blackwell"}
