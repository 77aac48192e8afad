"""Staged expert parallelism on emulated Hopper kernels: two processes, the bits of one rank."""

import pytest

from megamoe.planner.numerics import HOPPER_RECIPES as RECIPES
from tests.distributed.hopper_ranks import staged_is_fused_is_one_rank
from tests.distributed.ranks import launch
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")

CASES = [
    *((recipe, {}) for recipe in RECIPES),
    ("w4a8_block", {"combine": "fp8", "weight_at": "combine"}),
    ("w8a8", {"combine": "fp8", "has_shared": True}),
    ("w4a16", {"has_shared": True, "clamp": 0.5}),
]


@pytest.mark.parametrize(("recipe", "options"), CASES, ids=str)
def test_staged_over_a_group_has_the_bits_of_fused_and_of_one_rank(recipe, options):
    ends = launch(2, staged_is_fused_is_one_rank, recipe, tuple(options.items()), limit_s=300.0)
    assert [(end.result, end.error) for end in ends] == [(True, "")] * 2
