"""LocalWorld: R ranks of the layer in one process, through the protocol of the reference system.

The roles, words and barriers are those of `protocol`, which the explorer runs under
thousands of interleavings; only the rows are real here, and the arithmetic is the reference's. So
the result is, bit for bit, that of `reference.expert_parallel` and of one rank. On a Hopper GPU
`engine.local.LocalRanks` runs several ranks in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from megamoe.errors import MegaMoETimeout, ShapeError, require
from megamoe.formats.quantized import Quantized
from megamoe.problem import Options
from megamoe.reference import layer
from megamoe.routing.permute import check_expert_ids, expert_counts
from megamoe.studies.deep_gemm.blocks import Block, Grid
from megamoe.studies.deep_gemm.explore.policies import POLICIES
from megamoe.studies.deep_gemm.plan import Plan
from megamoe.studies.deep_gemm.protocol.words import Shape
from megamoe.studies.deep_gemm.protocol.world import World

# A row is computed whole: a block is all columns, so results depend on no tile.
WHOLE_ROWS = 1
SOME_STORES = 0.1  # chance per step that a store becomes visible before its release, if seeded

Progress = Callable[[int, int], None]  # blocks done, of


class LocalWorld:
    """Runs calls of `num_ranks` ranks. It keeps no state between calls.

    num_sms           per rank; they share the blocks out, and the order never changes a bit
    block_m           rows of a block
    experts_per_wave  None: a quarter of a rank's experts
    ring_rows         None: the pool holds everything
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        num_sms: int = 2,
        block_m: int = 64,
        experts_per_wave: int | None = None,
        ring_rows: int | None = None,
    ) -> None:
        require(
            num_ranks >= 1 and num_sms >= 1,
            "num_ranks and num_sms must be at least 1",
            got=f"{num_ranks} and {num_sms}",
            kind=ShapeError,
        )
        self.num_ranks, self.num_sms, self.block_m = num_ranks, num_sms, block_m
        self.experts_per_wave, self.ring_rows = experts_per_wave, ring_rows

    def run(
        self,
        x: Sequence[Tensor | Quantized],
        topk_idx: Sequence[Tensor],
        topk_weights: Sequence[Tensor],
        weights: Sequence[layer.Experts],
        options: Options | None = None,
        shared: layer.Experts | None = None,
        *,
        plan: Plan | None = None,
        seed: int | None = None,
        progress: Progress = lambda done, of: None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """One call on every rank: bf16 [T_r, H] per rank, and int64 [E / R], rows received.

        Tokens may differ in number, also none. `plan` gives the row tile, waves, ring and lag
        instead of the world's own. `seed` None lets the roles take turns; a number draws every
        step, and when stores become visible, at random: the bits are the same.
        """
        self._check(x, topk_idx, topk_weights, weights)
        shape = self._shape(topk_idx, weights, plan)
        payload = _Rows(x, topk_idx, topk_weights, weights, options or Options())
        payload.report(progress, shape.grid.block_m)
        rng = Random(seed)
        drain = 1.0 if seed is None else SOME_STORES
        world = World(shape, payload, rng=rng, drain=drain)
        world.queue([[idx.tolist() for idx in topk_idx]])
        choose = POLICIES["round_robin" if seed is None else "uniform"](rng, shape)
        world.machine.run(choose)
        _check_ended(world)
        stats = [
            torch.tensor(world.read("recv_stats", rank), dtype=torch.int64)
            for rank in range(self.num_ranks)
        ]
        return payload.outputs(shared), stats

    def _shape(
        self, topk_idx: Sequence[Tensor], weights: Sequence[layer.Experts], plan: Plan | None
    ) -> Shape:
        local = len(weights[0].w13)
        block_m, ring, lag = self.block_m, self.ring_rows, None
        wave = self.experts_per_wave or max(1, local // 4)
        if plan is not None:
            block_m, wave, lag = plan.tiles.block_m, plan.experts_per_wave, plan.lag
            ring = plan.capacity.ring_rows if plan.capacity.is_ring else None
        return Shape(
            num_ranks=self.num_ranks,
            num_sms=self.num_sms,
            num_experts=local * self.num_ranks,
            top_k=topk_idx[0].shape[1],
            max_tokens=max(1, *map(len, topk_idx)),
            grid=Grid(block_m, WHOLE_ROWS, WHOLE_ROWS),
            experts_per_wave=min(wave, local),
            ring_rows=ring,
            lag=lag,
        )

    def _check(
        self,
        x: Sequence[Tensor | Quantized],
        topk_idx: Sequence[Tensor],
        topk_weights: Sequence[Tensor],
        weights: Sequence[layer.Experts],
    ) -> None:
        for name, each in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights),
                           ("weights", weights)):  # fmt: skip
            require(
                len(each) == self.num_ranks,
                f"{name} must have one entry for each of {self.num_ranks} ranks",
                got=len(each),
                kind=ShapeError,
            )
        first = weights[0]
        for owner in weights:
            require(
                owner.recipe == first.recipe and owner.w13.shape == first.w13.shape,
                "all ranks must hold as many experts of the same recipe and widths",
                got=f"{owner.recipe} {owner.w13.shape} beside {first.recipe} {first.w13.shape}",
                kind=ShapeError,
            )
        hidden, top_k = first.w13.shape[-1], topk_idx[0].shape[-1]
        for tokens, idx, weight in zip(x, topk_idx, topk_weights, strict=True):
            fits = tuple(tokens.shape) == (len(idx), hidden)
            require(
                fits and idx.shape == weight.shape == (len(idx), top_k),
                f"every rank needs x [T, {hidden}], topk_idx and topk_weights [T, {top_k}]",
                got=f"{tuple(tokens.shape)}, {tuple(idx.shape)} and {tuple(weight.shape)}",
                kind=ShapeError,
            )
            check_expert_ids(idx, len(first.w13) * self.num_ranks)


class _Rows:
    """The payload of real rows. A token travels as its rank has it; its owner quantises it."""

    def __init__(
        self,
        x: Sequence[Tensor | Quantized],
        topk_idx: Sequence[Tensor],
        topk_weights: Sequence[Tensor],
        weights: Sequence[layer.Experts],
        options: Options,
    ) -> None:
        self.x, self.weights, self.options = x, weights, options
        self.topk_idx, self.topk_weights = topk_idx, [w.float() for w in topk_weights]
        self.gates = [w.tolist() for w in self.topk_weights]
        # Quantised tokens are dequantised once: their values are what every owner computes with.
        self.rows = [t if isinstance(t, Tensor) else layer.tokens_as(t, weights[0]) for t in x]
        self.y = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in self.rows]
        self.done, self.of = 0, 0
        self.progress: Progress = lambda done, of: None

    def report(self, progress: Progress, block_m: int) -> None:
        """Call `progress` after every block."""
        num = len(self.weights) * len(self.weights[0].w13)
        counts = torch.stack([expert_counts(idx, num) for idx in self.topk_idx]).sum(0)
        self.progress, self.of = progress, 2 * int((-(-counts // block_m)).sum())

    def outputs(self, shared: layer.Experts | None) -> list[Tensor]:
        """bf16 [T, H] of every rank, shared experts added last."""
        if shared is not None:
            pairs = zip(self.y, self.x, strict=True)
            self.y = [layer.add_shared(y, x, shared, self.options) for y, x in pairs]
        return [y.to(torch.bfloat16) for y in self.y]

    # -- the payload ---------------------------------------------------------------------------

    def token(self, call: int, rank: int, token: int) -> Tensor:
        return self.rows[rank][token]

    def weight(self, call: int, rank: int, token: int, slot: int) -> float:
        gate: float = self.gates[rank][token][slot]
        return gate

    def tile(self, call: int, rank: int, block: Block) -> int:
        return block.expert

    def l1(
        self, call: int, rank: int, block: Block, rows: Sequence[Tensor], weights: Sequence[float],
        tile: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Activations float64 [m, I]; the weights travel with them, for a bias of L2."""
        experts = self.weights[rank]
        x = torch.stack(list(rows))
        if x.dtype != torch.float64:
            x = layer.tokens_as(x, experts)
        gates = torch.tensor(weights, dtype=torch.float32, device=x.device)
        self._step()
        return layer.l1_acts(x, gates, experts, tile, self.options), gates

    def l2(
        self, call: int, rank: int, block: Block, acts: Sequence[Any], tile: int
    ) -> Sequence[Tensor]:
        (values, gates) = acts[0]
        rows = layer.l2_rows(values, gates, self.weights[rank], tile, self.options)
        self._step()
        return rows.unbind()

    def combine(
        self, call: int, rank: int, token: int, rows: Sequence[tuple[int, Sequence[Tensor]]]
    ) -> None:
        gates, y = self.topk_weights[rank][token : token + 1], self.y[rank]
        valid = torch.zeros(gates.shape, dtype=torch.bool, device=y.device)
        dtype = rows[0][1][0].dtype if rows else torch.bfloat16
        slots = torch.zeros(*gates.shape, y.shape[1], dtype=dtype, device=y.device)
        for slot, (row,) in rows:
            valid[0, slot] = True
            slots[0, slot] = row
        y[token] = layer.combine(slots, valid, gates, self.options)[0]

    def _step(self) -> None:
        self.done += 1
        self.progress(self.done, self.of)


def _check_ended(world: World) -> None:
    """The call ended on every rank and left a clean workspace; otherwise say who waits for what."""
    for waiting in world.machine.waiting():
        barrier = f"{waiting.what} {waiting.tag} ({waiting.word})"
        raise MegaMoETimeout(waiting.rank, barrier, waiting.expected, waiting.seen)
    for rank in range(world.shape.num_ranks):
        world.check_clean(rank)
