"""Load: what even routing brings to a rank. The figures that heuristics and floors start from."""

from __future__ import annotations

from megamoe.problem import Problem


def rows_per_rank(problem: Problem) -> int:
    """Rows that a rank's experts receive when every rank sends alike."""
    return problem.num_tokens * problem.top_k


def even_rows(problem: Problem) -> tuple[int, ...]:
    """Rows of each local expert when routing is perfectly even."""
    each, rest = divmod(rows_per_rank(problem), problem.num_local_experts)
    return tuple(each + (expert < rest) for expert in range(problem.num_local_experts))


def touched_experts(problem: Problem) -> float:
    """Expected number of local experts that random routing reaches: E (1 - (1 - 1/E) ** rows)."""
    local = problem.num_local_experts
    return float(local * (1.0 - (1.0 - 1.0 / local) ** rows_per_rank(problem)))
