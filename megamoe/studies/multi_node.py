"""A study of expert parallelism over several nodes: chains inside, rails between. Nothing runs it.

Rank g of every node is on rail g. A source sends a token once to each node that needs it, to the
rank of its own rail, whose memory the node's owners then read as they read a peer's; rows go home
the same way, one a slot, since adding them on the way would change the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megamoe.errors import ShapeError, require
from megamoe.formats.spec import BF16, FP8_COMBINE, recipe_named
from megamoe.layout.rows import stored_bytes
from megamoe.planner.plan import plan
from megamoe.problem import Problem
from megamoe.simulator.simulate import simulate

RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Nodes:
    """One call over nodes, simulated; times in us, bytes of one rank's network port, one way."""

    inside_us: float  # the chain of one node, as the simulator plays it
    token_bytes: float
    row_bytes: float
    tokens_by_rank_bytes: float  # of tokens that cross once a rank instead of once a node
    network_us: float

    @property
    def serial_us(self) -> float:
        """Nothing hidden."""
        return self.inside_us + self.network_us

    @property
    def overlapped_us(self) -> float:
        """Everything hidden: a bound, no prediction."""
        return max(self.inside_us, self.network_us)


def missed(share: float, top_k: int) -> float:
    """The chance that none of a token's slots falls into a share of the experts.

    >>> missed(0.5, 6)
    0.015625
    """
    return (1.0 - share) ** top_k


def study(problem: Problem, num_nodes: int, network_gbs: float, *, rows: str = "bf16") -> Nodes:
    """Even routing over `num_nodes` nodes of eight H200.

    problem      tokens of one rank, all experts; its ranks are those of all nodes
    network_gbs  reached by one rank's port in one direction
    rows         on their way home: "bf16" or "fp8"
    """
    p = problem
    ranks = num_nodes * RANKS_PER_NODE
    require(
        num_nodes > 1 and p.num_ranks == ranks and p.num_experts % ranks == 0,
        f"{num_nodes} nodes have {ranks} ranks, and as many experts on each",
        got=f"{p.num_ranks} ranks, {p.num_experts} experts",
        kind=ShapeError,
    )
    node = replace(p, num_experts=p.num_experts // num_nodes, num_ranks=RANKS_PER_NODE)
    inside = simulate(plan(node, "h200", mode="chain"), skew="even").time_us
    others = num_nodes - 1
    token = stored_bytes(p.hidden, recipe_named(p.recipe).acts)
    row = stored_bytes(p.hidden, BF16 if rows == "bf16" else FP8_COMBINE)
    tokens = p.num_tokens * others * (1 - missed(1 / num_nodes, p.top_k)) * token
    by_rank = p.num_tokens * others * RANKS_PER_NODE * (1 - missed(1 / ranks, p.top_k)) * token
    home = p.num_tokens * p.top_k * others / num_nodes * row
    return Nodes(inside, tokens, home, by_rank, (tokens + home) / (network_gbs * 1e3))
