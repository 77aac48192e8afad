"""Shared by all tests: quiet threads, and GPU tests that say why they did not run."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; none here"))
