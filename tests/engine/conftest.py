"""Fixtures of the engine's tests."""

from dataclasses import replace

import pytest

from megamoe.engine import backends, status
from tests.engine.pretended import Launches, weights
from tests.pretending import pretend_h200


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that the hopper backend takes for its own."""
    from megamoe.engine import gluon
    from megamoe.kernels.hopper.mega import launch as mega_launch

    fake = Launches()
    fake.weights = weights()
    there = tuple(
        replace(b, why_not=lambda device: "") if b.name in ("hopper", "portable") else b
        for b in backends.BACKENDS
    )
    monkeypatch.setattr(backends, "BACKENDS", there)
    monkeypatch.setattr(mega_launch, "fused", fake.fused)
    monkeypatch.setattr(gluon, "run_staged", fake.staged)
    pretend_h200(monkeypatch)
    monkeypatch.setattr(status, "_BY_STREAM", {})
    return fake


@pytest.fixture
def cuda(monkeypatch):
    """A CPU that graphs take for a GPU."""
    from tests.engine import pretended_cuda

    return pretended_cuda.install(monkeypatch)
