"""A layer over a group in mode chain: two processes, emulated kernels, the bits of one rank."""

import pytest

from tests.distributed.chain_processes import (
    calls_have_the_bits_of_one_rank,
    who_does_not_come_is_named,
)
from tests.distributed.ranks import launch
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")


@pytest.mark.parametrize(
    ("recipe", "has_replicas"), [("w8a8", True), ("w4a8_block", False)], ids=["replicas", "fp4"]
)
def test_calls_have_the_bits_of_one_rank(recipe, has_replicas, tmp_path):
    how = str(tmp_path), recipe, has_replicas
    ends = launch(2, calls_have_the_bits_of_one_rank, *how, limit_s=300.0)
    assert [(end.result, end.error) for end in ends] == [(True, "")] * 2


def test_who_does_not_come_is_named(tmp_path):
    ends = launch(2, who_does_not_come_is_named, str(tmp_path), limit_s=300.0)
    assert [(end.result, end.error) for end in ends] == [(True, "")] * 2
