"""Explore: the protocol under many interleavings, with rows that say who they are."""

from megamoe.schedule.explore.case import CASES, Case
from megamoe.schedule.explore.mutations import MUTATIONS
from megamoe.schedule.explore.policies import POLICIES
from megamoe.schedule.explore.run import Outcome, Report, explore, explore_many

__all__ = [
    "CASES", "MUTATIONS", "POLICIES", "Case", "Outcome", "Report", "explore", "explore_many",
]  # fmt: skip
