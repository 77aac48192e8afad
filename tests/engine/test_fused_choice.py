"""What `auto` comes to over a group: all ranks alike, whatever one of them finds."""

from types import SimpleNamespace

import pytest

from megamoe.engine import group_calls
from megamoe.engine.planning import log_once
from megamoe.errors import MegaMoETimeout, NotAvailable, ShapeError
from megamoe.planner.buckets import UpTo

SIZES = (UpTo(120, "fused", "one launch"), UpTo(4096, "chain", "no host"))
FITS = [{"fits_e4m3": True, "launches": 1}, {"fits_e4m3": True, "symmetric bytes": 7}]
READY = UpTo(4096, "chain", "quantised tokens")
ALIKE = [[list(one) for one in (*SIZES, READY)], FITS]
NONE = [[[0, "staged", "no memory"], None], []]


class Layer:
    """A layer on a GPU, as `join` sees it: both modes, unless there is a reason."""

    _wants_graphs = False

    def __init__(self, mode="auto", backend="hopper", sizes=SIZES, quantized=READY):
        self._wanted, self.backend, self.sizes = ("auto", mode), backend, sizes
        self.quantized = quantized
        self.max_tokens_per_rank, self.top_k, self._status = 4096, 2, None

    def _modes(self):
        if isinstance(self.sizes, Exception):
            raise self.sizes
        return self.sizes, self.quantized

    def _plan_in(self, mode, bound):
        return SimpleNamespace(mode=mode, bound=bound)


def world(*others):
    """This rank, then ranks that say `others` to any question."""
    gather = lambda step, make: [make(), *others]  # noqa: E731
    rendezvous = SimpleNamespace(gather=gather, rank=0)
    return SimpleNamespace(rendezvous=rendezvous, placement=None, num_ranks=1 + len(others))


@pytest.fixture
def made(monkeypatch):
    """Modes that memory was shared for, with the tokens of a rank."""
    found = []

    def make(mode):
        def shared(layer, rendezvous, given, memory):
            found.append((mode, given))
            return SimpleNamespace(
                num_tokens=given, bucket=lambda bound: bound, mode=mode, memory=memory
            )

        return shared

    monkeypatch.setattr(group_calls, "FusedGroup", make("fused"))
    monkeypatch.setattr(group_calls, "ChainGroup", make("chain"))
    monkeypatch.setattr(group_calls, "_OtherMode", lambda fused, chain: None)
    for module, card in zip((group_calls.fused_group, group_calls.chain_group), FITS, strict=True):
        monkeypatch.setattr(module, "describe", lambda plan, card=card: card)
        monkeypatch.setattr(module, "regions", lambda plan: None)
    memory = SimpleNamespace(status=SimpleNamespace(explain=None))
    monkeypatch.setattr(group_calls, "memory_for", lambda *given: memory)
    return found


def test_auto_has_both_modes_where_every_rank_can(made):
    calls, why = group_calls.join(Layer(), world(ALIKE))
    assert why == "" and made == [("fused", 120), ("chain", None)]
    assert calls.mode == "auto" and "fused up to 120 tokens of a rank" in calls.why
    assert [calls.pick(num).calls.mode for num in (0, 120, 121, None)] == [
        "fused", "fused", "chain", "chain",
    ]  # fmt: skip
    assert calls.pick(1, is_quantized=True).calls.mode == "chain"


def test_larger_calls_are_staged_where_the_chain_is_not_taken(made):
    sizes = (SIZES[0], UpTo(4096, "staged", "switched off"))
    ready = UpTo(4096, "staged", "switched off")
    other = [[list(one) for one in (*sizes, ready)], FITS[:1]]
    calls, _ = group_calls.join(Layer(sizes=sizes, quantized=ready), world(other))
    assert made == [("fused", 120)] and calls.pick(121).calls is None
    assert "staged above: switched off" in calls.why
    assert calls.pick(1, is_quantized=True).calls is None  # no fused launch takes them


def test_one_rank_that_cannot_keeps_all_staged_and_it_is_logged_once(made, caplog):
    log_once.cache_clear()
    for _ in range(2):
        assert group_calls.join(Layer(), world(NONE)) == (None, "rank 1: no memory")
    assert not made and caplog.messages == ["calls over the group are staged: rank 1: no memory"]
    why = NotAvailable("another placement")
    assert group_calls.join(Layer(sizes=why), world(ALIKE)) == (None, "rank 0: another placement")


def test_ranks_that_differ_are_staged(made):
    other = [ALIKE[0], [{"fits_e4m3": False, "launches": 1}, FITS[1]]]
    calls, why = group_calls.join(Layer(), world(other))
    assert calls is None and "fits_e4m3 differs" in why
    other = [[[64, "fused", ""], [4096, "chain", ""], list(READY)], FITS]
    calls, why = group_calls.join(Layer(), world(other))
    assert calls is None and "modes differs" in why and not made


def test_a_group_that_cannot_share_memory_is_staged_but_a_late_rank_is_named(made, monkeypatch):
    def fail(error):
        def make(*given):
            raise error

        monkeypatch.setattr(group_calls, "FusedGroup", make)

    fail(NotAvailable("all ranks on one host"))
    assert group_calls.join(Layer(), world(ALIKE)) == (None, "all ranks on one host")
    fail(MegaMoETimeout(0, "rank 1", 2, 1))
    with pytest.raises(MegaMoETimeout):
        group_calls.join(Layer(), world(ALIKE))


def test_what_is_asked_for_is_what_comes(made, monkeypatch):
    for mode in ("fused", "chain", "split"):
        calls, why = group_calls.join(Layer(mode), world())
        assert why == "" and calls.mode == mode
    assert made == [("fused", 4096), ("chain", None), ("chain", None)]
    assert group_calls.join(Layer("staged"), world()) == (None, "asked for")
    why = "backend reference has only staged calls over a group"
    assert group_calls.join(Layer(backend="reference"), world()) == (None, why)

    def refuse(*args):
        raise ShapeError("wrong")

    monkeypatch.setattr(group_calls, "FusedGroup", refuse)
    with pytest.raises(ShapeError):
        group_calls.join(Layer("fused"), world())
