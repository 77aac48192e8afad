"""What `auto` comes to over a group: all ranks alike, whatever one of them finds."""

from types import SimpleNamespace

import pytest

from megamoe.engine import fused_group
from megamoe.errors import MegaMoETimeout, NotAvailable, ShapeError

FITS = {"fits_e4m3": True}


class Layer:
    """A layer on a GPU, as `join` sees it."""

    def __init__(self, mode="auto", kind="cuda"):
        self._wanted, self.taken = ("auto", mode), []
        self.weights = SimpleNamespace(device=SimpleNamespace(type=kind))

    def _take(self, mode):
        self._wanted = ("auto", mode)
        self.taken.append(mode)


def world(*others):
    """This rank, then ranks that say `others` to any question."""
    meet = lambda step, make: [make(), *others]  # noqa: E731
    return SimpleNamespace(
        meeting=SimpleNamespace(meet=meet), placement=None, num_ranks=1 + len(others)
    )


@pytest.fixture
def made(monkeypatch):
    """Groups that were made; this rank finds nothing against them, and calls are one launch."""
    found = []
    monkeypatch.setattr(fused_group, "describe", lambda layer, placement: FITS)
    monkeypatch.setattr(fused_group, "_passes", lambda layer, num: (1, 64))
    monkeypatch.setattr(fused_group, "FusedGroup", lambda *args: found.append(args) or "group")
    return found


def test_auto_is_fused_where_every_rank_can_be(made):
    layer = Layer()
    assert fused_group.join(layer, world(["", FITS])) == ("group", "")
    assert layer.taken == ["fused"] and len(made) == 1


def test_one_rank_that_cannot_keeps_all_staged(made, monkeypatch):
    layer = Layer()
    assert fused_group.join(layer, world(["no memory", None])) == (None, "rank 1: no memory")
    assert layer.taken == ["fused", "auto"] and not made

    def refuse(layer, placement):
        raise NotAvailable("another placement")

    monkeypatch.setattr(fused_group, "describe", refuse)
    assert fused_group.join(Layer(), world(["", FITS])) == (None, "rank 0: another placement")


def test_several_launches_a_call_and_ranks_that_differ_are_staged(made, monkeypatch):
    group, why = fused_group.join(Layer(), world(["", {"fits_e4m3": False}]))
    assert group is None and "fits_e4m3 differs" in why
    monkeypatch.setattr(fused_group, "_passes", lambda layer, num: (49, 84))
    group, why = fused_group.join(Layer(), world(["", FITS]))
    assert group is None and why == "rank 0: a call would take 49 fused launches" and not made


def test_a_group_that_cannot_share_memory_is_staged_but_a_late_rank_is_told(made, monkeypatch):
    def fail(error):
        def make(layer, meeting):
            raise error

        monkeypatch.setattr(fused_group, "FusedGroup", make)

    layer = Layer()
    fail(NotAvailable("all ranks on one host"))
    assert fused_group.join(layer, world(["", FITS])) == (None, "all ranks on one host")
    assert layer.taken == ["fused", "auto"]
    fail(MegaMoETimeout(0, "rank 1", 2, 1))
    with pytest.raises(MegaMoETimeout):
        fused_group.join(Layer(), world(["", FITS]))


def test_what_is_asked_for_is_what_comes(made, monkeypatch):
    assert fused_group.join(Layer("fused"), world()) == ("group", "")
    assert fused_group.join(Layer("staged"), world()) == (None, "asked for")
    assert fused_group.join(Layer(kind="cpu"), world()) == (None, "the experts lie on no GPU")

    def refuse(*args):
        raise ShapeError("wrong")

    monkeypatch.setattr(fused_group, "FusedGroup", refuse)
    with pytest.raises(ShapeError):
        fused_group.join(Layer("fused"), world())
