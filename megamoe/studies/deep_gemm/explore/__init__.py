"""Explore: the protocol under many interleavings, with rows that say who they are."""

from megamoe.studies.deep_gemm.explore.case import CASES, Case
from megamoe.studies.deep_gemm.explore.mutations import MUTATIONS
from megamoe.studies.deep_gemm.explore.policies import POLICIES
from megamoe.studies.deep_gemm.explore.run import Outcome, Report, explore, explore_many

__all__ = [
    "CASES", "MUTATIONS", "POLICIES", "Case", "Outcome", "Report", "explore", "explore_many",
]  # fmt: skip
