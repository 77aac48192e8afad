"""A pytest plugin: processes that share one run, each test claimed by one of them.

    CLAIMS=FOLDER PYTHONPATH=.:scripts/gpu python3 -m pytest -p claim ...

Start as many processes as are wanted, with the same arguments and an empty folder. It needs no
package besides pytest: a machine with a GPU may have no network.
"""

import os
from pathlib import Path

from _pytest.runner import runtestprotocol

# What takes longest begins first; tests of minutes are claimed one by one, others as neighbours,
# which share compiled kernels.
FIRST = ("test_bits", "test_soak", "test_hopper_gpu", "test_chain_gpu", "test_fused_gpu",
         "test_split_gpu", "test_shared_gpu")  # fmt: skip
ALONE = ("test_bits", "test_soak")
BLOCK = 3
_MINE = {}  # block -> whether this process claimed it


def _rank(item):
    name = item.path.name
    return next((i for i, part in enumerate(FIRST) if part in name), len(FIRST))


def pytest_collection_modifyitems(items):
    items.sort(key=_rank)  # stable
    block, left = -1, 0
    for item in items:
        is_alone = any(part in item.path.name for part in ALONE)
        if left == 0 or is_alone:
            block, left = block + 1, 1 if is_alone else BLOCK
        item.claim_block, left = block, left - 1


def pytest_runtest_protocol(item, nextitem):
    if item.claim_block not in _MINE:
        _MINE[item.claim_block] = _claimed(item.claim_block)
    if _MINE[item.claim_block]:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=None)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _claimed(block):
    """Whether this process is the first to ask for a block."""
    try:
        os.close(os.open(Path(os.environ["CLAIMS"], str(block)), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
