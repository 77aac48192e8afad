"""Plan of the reference system: what its fused kernel would choose, each choice with its reason.

Pure integers: no tensor, no GPU. `schedule_of` makes a schedule of it that the simulator plays.
This library's own plan is `megamoe.planner.plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megamoe.errors import RangeError, require
from megamoe.hardware import Hardware
from megamoe.layout.regions import Workspace
from megamoe.planner.choice import Choice, SharedMemory, Value
from megamoe.planner.floor import Floor, floor
from megamoe.planner.load import even_rows
from megamoe.problem import Problem
from megamoe.simulator.schedule import NOT_OURS
from megamoe.studies.deep_gemm import steps
from megamoe.studies.deep_gemm.blocks import Block, Grid, blocks
from megamoe.studies.deep_gemm.capacity import Capacity, Wave, waves
from megamoe.studies.deep_gemm.choice import Role, Tiles
from megamoe.studies.deep_gemm.deal import largest_first
from megamoe.studies.deep_gemm.overrides import Picks


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that its launch would have to know."""

    problem: Problem
    hardware: Hardware
    choices: tuple[Choice, ...]
    tiles: Tiles
    roles: tuple[Role, ...]
    smem: SharedMemory
    capacity: Capacity
    workspace: Workspace
    floor: Floor

    def choice(self, name: str) -> Choice:
        """One choice with its reason."""
        found = {choice.name: choice for choice in self.choices}
        require(
            name in found,
            f"a plan has the choices {', '.join(found)}",
            got=name,
            kind=RangeError,
        )
        return found[name]

    def __getitem__(self, name: str) -> Value:
        return self.choice(name).value

    def _int(self, name: str) -> int:
        value = self[name]
        assert isinstance(value, int)
        return value

    @property
    def backend(self) -> str:
        """hopper or blackwell."""
        return str(self["backend"])

    @property
    def mode(self) -> str:
        """fused, staged or split."""
        return str(self["mode"])

    @property
    def deal(self) -> str:
        """static, ticket or largest_first."""
        return str(self["deal"])

    @property
    def combine(self) -> str:
        """bf16 or fp8 rows on their way home."""
        return str(self["combine"])

    @property
    def num_sms(self) -> int:
        """SMs that the launch uses."""
        return self._int("num_sms")

    @property
    def num_stages(self) -> int:
        """Stages of the ring in shared memory."""
        return self.smem.num_stages

    @property
    def experts_per_wave(self) -> int:
        """Local experts that share a wave."""
        return self._int("experts_per_wave")

    @property
    def lag(self) -> int | None:
        """Row blocks by which L2 follows L1 within a wave; None runs whole phases."""
        value = self["lag"]
        return value if isinstance(value, int) else None

    @property
    def grid(self) -> Grid:
        """The tile grid that `blocks` walks."""
        return steps.grid(self.problem, self.tiles)

    @property
    def ring_blocks(self) -> int:
        """Row blocks that really exist: pool block b lies in slot b % ring_blocks."""
        return self.capacity.ring_rows // self.tiles.block_m

    @property
    def num_waves(self) -> int:
        """Waves of a call under even routing."""
        return len(self.waves(even_rows(self.problem)))

    def waves(self, rows: Sequence[int]) -> tuple[Wave, ...]:
        """The waves of a rank whose local expert e received rows[e] rows, in claim order."""
        steps.check_rows(self.problem, self.capacity, rows)
        found = waves(
            rows,
            block_m=self.tiles.block_m,
            experts_per_wave=self.experts_per_wave,
            ring_rows=self.capacity.ring_rows if self.capacity.is_ring else None,
        )
        return largest_first(found) if self.deal == "largest_first" else found

    def blocks(self, rows: Sequence[int]) -> Iterator[Block]:
        """Every block of that rank in the order of claims."""
        return blocks(self.grid, self.waves(rows), lag=self.lag)

    def __str__(self) -> str:
        p = self.problem
        head = (
            f"{p.num_tokens} tokens a rank, {p.num_ranks} ranks, {p.num_experts} experts, "
            f"top-{p.top_k}, {p.hidden} x {p.intermediate}, {p.recipe} on {self.hardware.label}"
        )
        rows = [head, f"{NOT_OURS} (deep_gemm)", "choices"]
        shown = [(c.name, "none" if c.value is None else c.value, c.why) for c in self.choices]
        rows += [f"  {name:<18}{value:>10}  {why}" for name, value, why in shown]
        rows.append("roles (warps, registers)")
        rows += [f"  {r.name:<18}{r.num_warps:>4}{r.registers:>6}  {r.why}" for r in self.roles]
        rows += ["shared memory of a CTA", str(self.smem)]
        control, total = self.workspace.control_bytes, self.workspace.num_bytes
        rows.append(f"workspace of a rank: {total:,} bytes, {control:,} of them control")
        rows += ["floor of the call", str(self.floor)]
        return "\n".join(rows)


def plan(problem: Problem, hardware: Hardware | str, **overrides: Value) -> Plan:
    """Choose how `problem` runs on `hardware`; each override is checked and beats the choice.

    The names of overrides are the keys of `overrides.OVERRIDES`; one of None is not given.
    """
    hw = Hardware.named(hardware) if isinstance(hardware, str) else hardware
    picks = Picks(overrides)
    backend = steps.backend(picks, hw)
    mode = steps.mode(picks, problem, hw)
    num_sms = steps.num_sms(picks, hw, backend)
    tiles = steps.tiles(picks, problem, hw, backend, num_sms)
    smem = steps.shared_memory(picks, problem, hw, backend, tiles)
    roles = steps.roles(problem, hw, backend, tiles)
    combine = steps.combine(picks)
    pool = steps.pool_capacity(picks, problem, hw, backend, tiles)
    placed = steps.place(problem, hw, backend, pool, combine)
    steps.waves(picks, problem, backend, tiles, pool, num_sms)
    steps.order(picks, backend, mode)
    if mode == "split":
        steps.split(picks, num_sms)
    bound = floor(problem, hw, tiles.mma, combine)
    return Plan(problem, hw, picks.choices, tiles, roles, smem, pool, placed, bound)
