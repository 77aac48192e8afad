"""Fused calls of processes that share a GPU: symmetric memory, and MPS to run them together."""

import os
import shutil
import signal
import subprocess
import tempfile

import pytest

from tests.distributed.fused_ranks import (
    BOUND_S,
    MOST,
    all_sizes,
    calls,
    leaves,
    other_bounds,
    two_layers,
    up_to_2048,
)
from tests.distributed.ranks import launch
from tests.distributed.test_group import results
from tests.engine.test_hopper_gpu import IS_OTHER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_OTHER, reason="needs an sm_90 GPU; this is another"),
]

CALLS = 500
SLACK_S = 10.0


@pytest.fixture(scope="module")
def mps():
    """The folder of an MPS daemon: without one, processes take turns on the GPU."""
    tool = shutil.which("nvidia-cuda-mps-control")
    if tool is None:
        pytest.skip("needs nvidia-cuda-mps-control")
    folder = tempfile.mkdtemp(prefix="mps")  # short: it holds sockets
    env = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
    subprocess.run([tool, "-d"], env=env, check=True, timeout=30)
    yield folder
    subprocess.run([tool], input="quit\n", text=True, env=env, timeout=30, check=False)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("num_ranks", "recipe", "num", "most", "mode"),
    [(2, "w4a8_block", CALLS, MOST, "auto"), (4, "w4a8_block", CALLS, MOST, "fused"),
     (2, "w8a8", 50, MOST, "auto"),
     (2, "w4a8_block", 50, 5 * MOST, "fused")],  # the last in several launches
)  # fmt: skip
def test_processes_have_the_bits_of_one_rank(mps, num_ranks, recipe, num, most, mode):
    ends = results(launch(num_ranks, calls, mps, recipe, num, most, mode, limit_s=240))
    assert [wrong for wrong, _, _ in ends] == [0] * num_ranks
    received = [count for _, stats, _ in ends for count in stats]
    sent = [sum(counts) for counts in zip(*(sent for _, _, sent in ends), strict=True)]
    assert received == sent and sum(sent) > 0


@pytest.mark.parametrize(
    ("num_ranks", "recipe", "num", "has_graphs"),
    [(2, "w4a8_block", 200, False), (2, "w8a8", 1000, True), (4, "w4a8_block", 1000, True)],
)
def test_one_layer_serves_all_sizes(mps, num_ranks, recipe, num, has_graphs):
    """Fused and chained calls in turn, eagerly and from graphs, and nobody waits for the GPU."""
    ends = results(launch(num_ranks, all_sizes, mps, recipe, num, has_graphs, limit_s=400))
    for mode, why, wrong, _, _ in ends:
        assert (mode, wrong) == ("auto", 0) and "fused up to" in why and "chain above" in why
    received = [count for *_, stats, _ in ends for count in stats]
    sent = [sum(counts) for counts in zip(*(sent for *_, sent in ends), strict=True)]
    assert received == sent and sum(sent) > 0


def test_ranks_that_pass_other_bounds_get_an_error(mps):
    for text in results(launch(2, other_bounds, mps, limit_s=240)):
        assert "RankError: all ranks must pass the same max_tokens" in text


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_calls_of_1_to_2048_tokens_have_the_bits_of_one_rank(mps, num_ranks):
    ends = results(launch(num_ranks, up_to_2048, mps, "w4a8_block", CALLS, limit_s=400))
    assert [wrong for wrong, _, _ in ends] == [0] * num_ranks
    received = [count for _, stats, _ in ends for count in stats]
    sent = [sum(counts) for counts in zip(*(sent for _, _, sent in ends), strict=True)]
    assert received == sent and sum(sent) > 0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_layers_on_two_streams_follow_the_order_of_the_host(mps, num_ranks):
    assert results(launch(num_ranks, two_layers, mps, 300, limit_s=300)) == [[0, 0]] * num_ranks


WAITS = {
    "fused": "rank 1 to begin the call", "chain": "rank 1 to push its tokens' slots",
    "killed in a call": "rows that rank 1 computes",
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "how"),
    [("fused", "leaves"), ("fused", "killed"), ("fused", "never comes"), ("chain", "leaves"),
     ("chain", "killed"), ("chain", "never comes"), ("chain", "killed in a call")],
)  # fmt: skip
def test_a_process_that_is_gone_is_named_by_the_others_in_time(mps, mode, how):
    ends = launch(4, leaves, mps, mode, how, limit_s=240)
    gone = ends.pop(1)
    is_killed = how.startswith("killed")
    assert gone.exitcode == (-signal.SIGKILL if is_killed else 0)
    assert gone.result == (None if is_killed else "gone")
    for text, again, seconds in results(ends):
        assert WAITS.get(how, WAITS[mode]) in text and "restart the ranks" in text
        assert again == text and BOUND_S - 0.5 < seconds < BOUND_S + SLACK_S
