"""A pretended GPU whose launches are noted and not made."""

import pytest
from triton.runtime.jit import JITFunction

from megamoe.engine import (
    backends,
    blackwell,
    grouped,
    images,
    packed,
)
from megamoe.kernels.hopper.weights import pack
from tests.plan.support import MACHINE
from tests.pretending import pretend_b200, pretend_h200


@pytest.fixture
def launched(monkeypatch):
    """(kernel, grid, constants) of all that would have been launched, on a pretended H200."""
    found = []

    def keep(kernel, *args, grid, warmup, **constants):
        found.append((kernel.__name__, tuple(grid), constants))

    pretend_h200(monkeypatch)
    monkeypatch.setattr(JITFunction, "run", keep)
    facts = pack.Facts(True, True, True)
    monkeypatch.setattr(pack, "facts_of", lambda w: facts)
    monkeypatch.setattr(packed, "facts_of", lambda w: facts)
    monkeypatch.setattr(images, "_facts", lambda w: facts)
    monkeypatch.setattr(images, "fill", lambda *_: None)  # images without memory
    return found


@pytest.fixture
def machine(launched, monkeypatch, request):
    """The machine of the backend; a pretended H200 is there already."""
    backend = request.node.callspec.params["backend"]
    if backend == "blackwell":
        pretend_b200(monkeypatch)
        monkeypatch.setattr(
            blackwell, "known", lambda w, what, find, *_: what == "fits_bf16" or find(w)
        )
    return MACHINE[backend]


@pytest.fixture
def alone_on_b200(launched, monkeypatch):
    """Grouped GEMMs of the Blackwell backend."""
    pretend_b200(monkeypatch)
    monkeypatch.setattr(backends, "resolve", lambda *asked: None)
    monkeypatch.setattr(grouped, "known", lambda w, what, find, *_: what == "fits_bf16" or find(w))
