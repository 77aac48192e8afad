"""For all tests: quiet threads, GPU tests that say why they did not run, cases for --every."""

import gc

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--every",
        action="store_true",
        help="run cases marked `every` too: more of a kind whose extremes always run",
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("every"):
        left = [item for item in items if "every" in item.keywords]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if "every" not in item.keywords]
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; none here"))


def pytest_collection_finish():
    """Compilers make millions of short-lived objects: an eighth of their time is collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
