"""Fused mode around its launch, which is the oracle's here: which calls take it, and with what."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import megamoe as mm
from megamoe.engine import launch_options, op, status
from megamoe.engine.status import COUNTERS, GAVE_UP, NONE, DeviceStatus
from megamoe.errors import CapacityError, DTypeError, MegaMoETimeout, NotAvailable, RangeError
from megamoe.kernels.gluon.mega.sync import L1_DONE
from megamoe.planner.fused import check_grid
from megamoe.planner.hopper import max_tiles
from megamoe.planner.tables import hopper as tables
from megamoe.planner.tables.hopper import MAX_SLOTS
from tests.engine.pretended import E, H, K, make, tokens, wanted, weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", ["fused", "auto", "staged"])
def test_a_mode_is_one_launch_or_several_with_the_same_result(gpu, mode):
    inputs = tokens()
    one = make(gpu, mode=mode)
    assert torch.equal(one(*inputs), wanted(inputs, gpu))
    call = mm.moe(*inputs, gpu.weights, backend="hopper", mode=mode)
    assert torch.equal(call, wanted(inputs, gpu))
    assert gpu.log == ["staged" if mode == "staged" else "fused"] * 2


def test_auto_follows_its_table(gpu, monkeypatch):
    rows = (12, "fused", "for this test"), (1e9, "staged", "for this test")
    monkeypatch.setattr(tables, "MODES", rows)
    one = make(gpu, mode="auto")
    assert [one.plan(num).mode for num in (1, 6, 7)] == ["fused", "fused", "staged"]
    assert one.plan(6).why == "for this test"


def test_fused_runs_fused_or_is_refused_with_the_reason(gpu):
    one = make(gpu)
    x, idx, weight = tokens()
    with pytest.raises(DTypeError, match="these come quantised"):
        one(mm.quantize(x, "mxfp8"), idx, weight)
    with pytest.raises(CapacityError, match=r"50\.0 rows an expert need the tile swap_ab 128x128"):
        one(*tokens(200))
    with pytest.raises(CapacityError, match="4096 slots at most; got 4098"):
        one(*tokens(2049))
    assert one(*tokens(0)).shape == (0, H) and gpu.log == []
    assert one.plan(8).mode == "fused" and one.why.endswith("mode fused: asked for")


def test_fallbacks_of_auto_are_planned_with_the_reason(gpu):
    one = make(gpu, mode="auto")
    x, idx, weight = tokens()
    one(mm.quantize(x, "mxfp8"), idx, weight)
    one(*tokens(200))
    assert gpu.log == ["staged"] * 2
    assert (
        "quantised" in one.plan(10, is_quantized=True).why
        and "50.0 rows an expert" in one.plan(200).why
    )


def test_auto_with_wide_tiles_is_staged(gpu):
    make(gpu, mode="auto")(*tokens(200))
    make(gpu, mode="auto", overlap_launches=False)(*tokens(200))
    make(gpu, mode="auto", combine="fp8")(*tokens())
    assert gpu.log == ["staged", "staged alone", "fused"]


@pytest.mark.parametrize("mode", ["auto", "fused"])
def test_shared_experts_like_the_others_are_of_the_same_launch(gpu, mode):
    inputs, gpu.shared = tokens(), weights(seed=1, experts=2)
    layer = make(gpu, mode=mode, shared=gpu.shared)
    y = mm.moe(*inputs, gpu.weights, shared=gpu.shared, backend="reference")
    assert torch.equal(layer(*inputs), y) and not torch.equal(y, wanted(inputs, gpu))
    call = gpu.calls[0]
    assert (gpu.log, call["num_shared"], call["num_experts"]) == (["fused"], 2, E + 2)
    assert call["tokens"].rows.shape == (10 * (K + 2), H)
    if mode == "auto":
        layer(*tokens(200))  # a wide tile
    assert gpu.log == ["fused", "staged"][: len(gpu.log)] and layer.stats.shape == (E,)


def with_bias(w):
    return replace(w, b2=torch.zeros(w.num_experts, H))


APART = [
    (lambda w: weights("w4a16", experts=1), "shared experts in w4a16, the others in w4a8"),
    (lambda w: with_bias(w[:1]), "shared experts and biases"),
    (lambda w: narrow(), "shared experts of 32, the others of 64"),
]


def narrow():
    w13, w2 = torch.randn(1, 64, H).bfloat16(), torch.randn(1, H, 32).bfloat16()
    return mm.ExpertWeights.quantize(w13, w2, "w4a8")


@pytest.mark.parametrize(("shared", "why"), APART)
def test_other_shared_experts_run_staged_and_an_explicit_fused_is_refused(gpu, shared, why):
    shared = shared(gpu.weights)
    make(gpu, mode="auto", shared=shared)(*tokens())
    assert gpu.log == ["staged"]
    for make_it in (
        lambda: make(gpu, shared=shared),
        lambda: mm.moe(*tokens(), gpu.weights, backend="hopper", mode="fused", shared=shared),
    ):
        with pytest.raises(NotAvailable, match=f"scales, without bias; got {why}"):
            make_it()
    assert gpu.log == ["staged"]


def test_shared_experts_in_fp8_are_their_own_launches(gpu):
    gpu.weights = weights("w8a8")
    with pytest.raises(NotAvailable, match="got shared experts in w8a8; use"):
        make(gpu, shared=gpu.weights[:1])


def test_weights_that_hopper_cannot_hold_have_no_fused_mode(gpu):
    gpu.weights.w2.scale[0, 0, 0] = 0
    with pytest.raises(NotAvailable, match=r"exactly: a scale of 2.*got fused"):
        mm.MoE(gpu.weights, E, K, mode="fused")
    assert mm.MoE(gpu.weights, E, K).backend == "portable"


def test_the_launch_gets_what_the_layer_was_given(gpu):
    make(gpu, timeout_s=2.5, reserve_sms=4)(*tokens())
    make(gpu, timeout_s=300)(*tokens())
    first, second = gpu.calls
    assert (first["timeout_s"], first["step"].grid) == (2.5, (128,))
    assert (second["timeout_s"], second["step"].grid) == (60.0, (132,))


def test_a_wait_may_take_longer_under_the_sanitizer(monkeypatch):
    assert launch_options.is_watched({"PATH": "x", "NV_SANITIZER_INJECTION_PORT_BASE": "49152"})
    assert not launch_options.is_watched({"PATH": "x"})
    assert launch_options.bound_s(300) == 60 and launch_options.bound_s(3) == 3
    monkeypatch.setattr(launch_options, "_SLOWER", launch_options.SLOWER)
    assert launch_options.bound_s(3) == 60


def test_a_request_that_leaves_no_sm_is_refused(gpu):
    for bad in ({"reserve_sms": -1}, {"timeout_s": 0.0}):
        with pytest.raises(RangeError, match=next(iter(bad))):
            make(gpu, **bad)
    check_grid(132, 131, 1)
    with pytest.raises(CapacityError, match=r"1 of the GPU's 132 SMs.*got reserve_sms 132"):
        make(gpu, reserve_sms=132)
    with pytest.raises(CapacityError, match="8 of the GPU's 132"):
        check_grid(132, 125, 8)


# -- counters and reports ------------------------------------------------------------------------


def test_counters_suffice_for_every_call_and_have_lines_of_their_own():
    most = max(max_tiles(MAX_SLOTS, num, 8) for num in (1, 8, 256, 10**6))
    assert L1_DONE.value + most <= COUNTERS
    device_status = DeviceStatus(CPU, ranks=8)
    assert device_status.counters.shape == (COUNTERS,) and COUNTERS % 32 == 0
    assert (device_status.counters.data_ptr() - device_status.storage.data_ptr()) % 128 == 0
    assert (
        not device_status.counters.any()
        and not device_status.report.any()
        and (device_status.bad_slot == NONE).all()
    )


def test_every_layer_has_counters_of_its_own_for_all_sizes(gpu):
    one, other = make(gpu), make(gpu)
    for layer in (one, one, other, copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        layer(*tokens(3))
        layer(*tokens(30))
    where = [call["kept"].counters.data_ptr() for call in gpu.calls]
    assert where[:4] == [one._status.counters.data_ptr()] * 4 and len(set(where)) == 4
    reports = [call["kept"].report.data_ptr() for call in gpu.calls]
    assert reports[0] == one._status.storage[8:].data_ptr()


def test_calls_without_a_layer_have_counters_by_stream(monkeypatch):
    made, now, is_capturing = [], ["a"], [False]

    class Stream:
        cuda_stream = property(lambda self: now[0])

    def make_one(device, resets_itself):
        assert resets_itself and not is_capturing[0], "never made while a stream is capturing"
        made.append(now[0])
        return object()

    monkeypatch.setattr(status, "_BY_STREAM", {})
    monkeypatch.setattr(status, "DeviceStatus", make_one)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    cuda = torch.device("cuda", 0)
    first = status.of_stream(cuda)
    assert status.of_stream(cuda) is first and made == ["a", "a"]  # and one for captures
    now[0] = "b"
    second = status.of_stream(cuda)
    assert second is not first
    is_capturing[0] = True
    captured = status.of_stream(cuda)
    now[0] = "c"
    assert status.of_stream(cuda) is captured and captured not in (first, second)


def test_a_captured_call_without_a_layer_is_staged(gpu, monkeypatch):
    monkeypatch.setattr(status, "is_capturing", lambda device: True)
    mm.moe(*tokens(), gpu.weights, backend="hopper")
    with pytest.raises(NotAvailable, match="no counters of its own"):
        mm.moe(*tokens(), gpu.weights, backend="hopper", mode="fused")
    make(gpu)(*tokens())  # a layer's counters are its own
    assert gpu.log == ["staged", "fused"]


def test_another_stream_waits_for_the_last_fused_call(monkeypatch):
    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append((self.name, other.name))

    log, streams = [], [Stream("a"), Stream("b")]
    device_status = DeviceStatus(CPU)
    monkeypatch.setattr(status, "is_capturing", lambda device: False)
    monkeypatch.setattr(
        device_status, "storage", type("Words", (), {"device": torch.device("cuda")})
    )
    for at in (0, 0, 1, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, at=at: streams[at])
        device_status.order_after_last()
    assert log == [("b", "a"), ("a", "b")]


REPORTS = [
    ([3, 0, 17, 1, 0, 5, 4, 0], 0, r"the pool of tokens \(CTA 17"),
    ([1, 2, 40, 2, 5, 16, 15, 0], 2, "L1 of tile 5"),
    ([9, 1, 0, 3, 1, 1056, 1052, 0], 1, "the end of all ranks"),
]


@pytest.mark.parametrize(("report", "rank", "text"), REPORTS)
def test_a_timeout_is_raised_on_every_call_until_reset(gpu, report, rank, text):
    one = make(gpu)
    gpu.report = report
    one(*tokens())
    gpu.report = None
    for call in (lambda: one(*tokens()), one.check, lambda: one(*tokens())):
        with pytest.raises(MegaMoETimeout, match=rf"{text}.*call layer.reset\(\)") as seen:
            call()
        assert (seen.value.rank, seen.value.expected, seen.value.seen) == (rank, *report[5:7])
    one._status.counters[7] = 3
    one.reset()
    assert not one._status.counters.any() and len(gpu.log) == 1
    assert torch.equal(one(*tokens()), wanted(tokens(), gpu))
    one.check()


def test_without_a_layer_a_timeout_is_raised_once(gpu):
    gpu.report = REPORTS[0][0]
    call = lambda: mm.moe(*tokens(), gpu.weights, backend="hopper", mode="fused")  # noqa: E731
    call()
    gpu.report = None
    with pytest.raises(MegaMoETimeout, match="the next call starts anew"):
        call()
    assert torch.equal(call(), wanted(tokens(), gpu))


def test_bad_slots_are_reported_once_and_come_with_the_report_in_one_copy(gpu, monkeypatch):
    one = make(gpu)
    copies = []
    true_copy = torch.Tensor.copy_
    x, idx, weight = tokens()
    idx[3, 1] = E
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda to, *a, **k: (copies.append(to), true_copy(to, *a, **k))[1]
    )
    one(x, idx, weight)
    assert [len(to) for to in copies if to is one._status._mirror] == [16]
    with pytest.raises(RangeError, match="token 3, slot 1 of an earlier"):
        one(*tokens())
    assert torch.equal(one(*tokens()), wanted(tokens(), gpu))


def test_a_staged_launch_that_gave_up_is_reported_once():
    device_status = DeviceStatus(CPU)
    device_status.bad_slot.fill_(GAVE_UP)
    with pytest.raises(MegaMoETimeout, match="tiles or weights of other CTAs"):
        device_status.check(K)
    device_status.check(K)


def test_poison_fills_all_memory_before_the_launch(gpu):
    def is_poisoned(call):
        all_of = (*call["pool"], call["acts"].data, call["acts"].scale, call["kept"].private)
        buffers = (*all_of, call["tokens"].rows, call["tokens"].y)
        seen.append(all((t.view(torch.uint8) == 0xFF).all() for t in buffers))
        assert not call["kept"].counters.any()

    seen, gpu.before = [], is_poisoned
    assert torch.equal(make(gpu, debug_poison=True)(*tokens()), wanted(tokens(), gpu))
    assert seen == [True]


# -- compiled models, graphs, ranks --------------------------------------------------------------


def test_the_operator_knows_the_mode_and_uses_the_layers_words(gpu):
    one = make(gpu, reserve_sms=2)
    _, options, backend, how, *_ = op._parse(one._what)
    assert (backend, how, options) == ("hopper", one._launch, one.options)
    inputs = tokens()
    y = op.moe_op(*inputs, list(one.experts.buffers()), one.stats, one._status.storage, one._what)
    assert torch.equal(y, wanted(inputs, gpu)) and gpu.log == ["fused"]
    assert gpu.calls[0]["kept"].counters.data_ptr() == one._status.counters.data_ptr()
    assert gpu.calls[0]["step"].grid == (130,)


def test_a_compiled_model_runs_fused(gpu):
    torch.compiler.reset()
    one = make(gpu)
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*tokens()), wanted(tokens(), gpu))
    assert gpu.log == ["fused"] and int(one.stats.sum()) == 10 * K


def test_a_graph_uses_the_layers_own_counters_and_its_count(gpu):
    from megamoe.kernels.portable.graph_io import Inputs

    one = make(gpu, cuda_graphs=True)
    inputs = Inputs.empty(16, H, K, CPU)
    for whole, part in zip(inputs, tokens(9), strict=False):
        whole[:9] = part
    inputs.count.fill_(9)
    y = one._captured_parts().launch(len(inputs.x), inputs)
    assert torch.equal(y[:9], wanted(tokens(9), gpu)) and not y[9:].any()
    assert gpu.calls[0]["kept"].counters.data_ptr() == one._status.counters.data_ptr()


def test_warming_up_runs_the_layers_mode(gpu):
    from megamoe.engine import warm

    warm.run_all(make(gpu, mode="auto"), [1, 9, 5000])
    assert gpu.log == ["fused", "fused", "staged"]
