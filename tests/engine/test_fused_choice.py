"""What `auto` comes to over a group: all ranks alike, whatever one of them finds."""

from types import SimpleNamespace

import pytest

from megamoe.engine import fused_group
from megamoe.engine.planning import log_once
from megamoe.errors import MegaMoETimeout, NotAvailable, ShapeError

FITS = {"fits_e4m3": True, "launches": 1}


class Layer:
    """A layer on a GPU, as `join` sees it: its plan is fused unless there is a reason."""

    def __init__(self, mode="auto", backend="hopper", why="", fits=True):
        self._wanted, self.backend, self.why, self.fits = ("auto", mode), backend, why, fits

    def _plan_in(self, mode):
        if isinstance(self.why, Exception):
            raise self.why
        return SimpleNamespace(
            mode="staged" if self.why else "fused", why=self.why, num_passes=1,
            call=SimpleNamespace(fits_e4m3=self.fits),
        )  # fmt: skip


def world(*others):
    """This rank, then ranks that say `others` to any question."""
    meet = lambda step, make: [make(), *others]  # noqa: E731
    return SimpleNamespace(
        meeting=SimpleNamespace(meet=meet), placement=None, num_ranks=1 + len(others)
    )


@pytest.fixture
def made(monkeypatch):
    """Groups that were made."""
    found = []
    monkeypatch.setattr(fused_group, "FusedGroup", lambda *args: found.append(args) or "group")
    return found


def test_auto_is_fused_where_every_rank_can_be(made):
    assert fused_group.join(Layer(), world(["", FITS])) == ("group", "")
    assert len(made) == 1


def test_one_rank_that_cannot_keeps_all_staged_and_it_is_logged_once(made, caplog):
    log_once.cache_clear()
    for _ in range(2):
        assert fused_group.join(Layer(), world(["no memory", None])) == (None, "rank 1: no memory")
    assert not made and caplog.messages == [
        "calls over the group are staged, not fused: rank 1: no memory"
    ]
    why = NotAvailable("another placement")
    assert fused_group.join(Layer(why=why), world(["", FITS])) == (
        None,
        "rank 0: another placement",
    )


def test_several_launches_a_call_and_ranks_that_differ_are_staged(made):
    other = {"fits_e4m3": False, "launches": 1}
    group, why = fused_group.join(Layer(), world(["", other]))
    assert group is None and "fits_e4m3 differs" in why
    group, why = fused_group.join(Layer(why="49 fused launches"), world(["", FITS]))
    assert group is None and why == "rank 0: 49 fused launches" and not made


def test_a_group_that_cannot_share_memory_is_staged_but_a_late_rank_is_named(made, monkeypatch):
    def fail(error):
        def make(layer, meeting):
            raise error

        monkeypatch.setattr(fused_group, "FusedGroup", make)

    fail(NotAvailable("all ranks on one host"))
    assert fused_group.join(Layer(), world(["", FITS])) == (None, "all ranks on one host")
    fail(MegaMoETimeout(0, "rank 1", 2, 1))
    with pytest.raises(MegaMoETimeout):
        fused_group.join(Layer(), world(["", FITS]))


def test_what_is_asked_for_is_what_comes(made, monkeypatch):
    assert fused_group.join(Layer("fused"), world()) == ("group", "")
    assert fused_group.join(Layer("staged"), world()) == (None, "asked for")
    why = "backend reference has no fused calls over a group"
    assert fused_group.join(Layer(backend="reference"), world()) == (None, why)

    def refuse(*args):
        raise ShapeError("wrong")

    monkeypatch.setattr(fused_group, "FusedGroup", refuse)
    with pytest.raises(ShapeError):
        fused_group.join(Layer("fused"), world())
