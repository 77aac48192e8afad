"""When ranks of a group fail, differ, or do not come: one clear error everywhere, in time."""

import copy
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import megamoe as mm
from megamoe import reference
from megamoe.engine.parallel import ReferenceCompute
from megamoe.errors import CapacityError, MegaMoEError, RangeError, RankError
from tests.distributed.ranks import die, launch
from tests.distributed.test_group import COUNTS, E, H, K, experts, inputs, results

BOUND_S = 2.0  # the layers' timeout in these tests
SOON_S = 10.0  # nobody waits: less than the 20 s that layers are given otherwise, on busy cores too
SLACK_S = 12.0  # to a bound, on busy cores


def build(rank, weights=None, **options):
    weights = experts("w4a8").for_rank(rank, dist.get_world_size()) if weights is None else weights
    return mm.MoE(weights, E, K, group=dist.group.WORLD, **{"timeout_s": 20.0, **options})


def call(layer, rank, seed=0):
    """One good call, checked."""
    x, idx, gates = inputs(dist.get_world_size(), COUNTS[seed:] + COUNTS[:seed])
    y = layer(x[rank], idx[rank], gates[rank])
    assert torch.equal(y, reference.moe(x[rank], idx[rank], gates[rank], experts("w4a8")))


def raised(act, *args, **kwargs):
    """What `act` raised, as text; and the seconds it took."""
    start = time.monotonic()
    try:
        act(*args, **kwargs)
    except MegaMoEError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    raise AssertionError("nothing was raised")


def gave_up(rank):
    dist.distributed_c10d._get_default_store().set(f"{rank} gave up", "1")


def wait_until_given_up(*ranks):
    """A rank that comes late does so after what it is late for, not after some seconds."""
    keys = [f"{rank} gave up" for rank in ranks]
    dist.distributed_c10d._get_default_store().wait(keys, timedelta(seconds=60))


# -- building ------------------------------------------------------------------------------------


def different(rank):
    """Each difference is refused on every rank with the same words; then a good layer works."""
    odd = rank == 1
    mine = experts("w4a8").for_rank(rank, 2)
    tries = {
        "recipe": lambda: build(rank, experts("w4a16" if odd else "w4a8").for_rank(rank, 2)),
        "width": lambda: build(rank, mm.ExpertWeights.quantize(
            torch.zeros(4, 64 if odd else 128, H), torch.zeros(4, H, 32 if odd else 64), "w4a8")),
        "options": lambda: build(rank, combine="fp8" if odd else "bf16"),
        "clamp": lambda: build(rank, clamp=7.0 if odd else None),
        "limit": lambda: build(rank, max_tokens_per_rank=8 if odd else 9),
        "top_k": lambda: mm.MoE(mine, E, 2 if odd else 3, group=dist.group.WORLD, timeout_s=20),
        "bound": lambda: build(rank, timeout_s=19.0 if odd else 20.0),
        "globals": lambda: build(rank, experts("nvfp4", x_global=2.0 if odd else 1.0)[:4]),
        "biases": lambda: build(rank, experts("w4a8", b2=torch.zeros(E, H))[:4] if odd else mine),
        "shared": lambda: build(rank, shared=experts("bf16", num=1) if odd else None),
        "placement": lambda: build(rank, placement=mm.Placement.contiguous(E, 2) if odd
            else mm.Placement(E, ((0, 2, 4, 6), (1, 3, 5, 7)))),
        "bad here": lambda: build(rank, experts("w4a8")[:2] if odd else mine),
        "bad option": lambda: build(rank, activation="relu" if odd else "swiglu"),
        "not weights": lambda: build(rank, [] if odd else mine),
    }  # fmt: skip
    found = {name: raised(act)[0] for name, act in tries.items()}
    call(build(rank), rank)
    return found


WORDS = {
    "recipe": "RankError: all ranks must build the same layer; recipe differs; got "
    '"w4a8" on rank 0 and "w4a16" on rank 1',
    "width": "intermediate differs; got 64 on rank 0 and 32 on rank 1",
    "options": 'combine differs; got "bf16" on rank 0 and "fp8" on rank 1',
    "clamp": "clamp differs; got null on rank 0 and 7.0 on rank 1",
    "limit": "max_tokens_per_rank differs; got 9 on rank 0 and 8 on rank 1",
    "top_k": "top_k differs; got 3 on rank 0 and 2 on rank 1",
    "bound": "timeout_s differs",
    "globals": "x_global differs; got 1.0 on rank 0 and 2.0 on rank 1",
    "biases": "biases differs; got [false, false] on rank 0 and [false, true] on rank 1",
    "shared": "shared differs; got null on rank 0",
    "placement": 'placement differs; got "',
    "bad here": "ShapeError: rank 1, step build the layer: num_experts must be the experts of all "
    "ranks, and all ranks hold as many; got num_experts 8 with weights of 2 on each of 2",
    "bad option": "RangeError: rank 1, step build the layer: activation must be one of",
    "not weights": "DTypeError: rank 1, step build the layer: weights must be an ExpertWeights",
}


def test_ranks_that_differ_are_refused_on_every_rank_with_the_difference():
    one, two = results(launch(2, different))
    assert one == two and set(one) == set(WORDS)
    for name, words in WORDS.items():
        assert words in one[name], one[name]


def one_never_builds(rank):
    mine = experts("w4a8").for_rank(rank, 4)
    dist.barrier()
    if rank == 1:
        wait_until_given_up(0, 2, 3)
    ended = raised(build, rank, mine, timeout_s=BOUND_S)
    gave_up(rank)
    return ended


def test_a_rank_that_never_builds_is_named_and_learns_of_it_when_it_comes():
    ends = results(launch(4, one_never_builds))
    for rank, (text, seconds) in enumerate(ends):
        assert text.startswith("MegaMoETimeout") and "restart the ranks" in text
        assert "waited too long for rank 1 in step build the layer" in text
        assert "expected 0x4; got 0x3" in text
        assert seconds < (SOON_S if rank == 1 else BOUND_S + SLACK_S)


# -- calls that are refused ----------------------------------------------------------------------


def refused(rank):
    """What one rank may not do, none does; the next call is as good as ever."""
    layer = build(rank, max_tokens_per_rank=8)
    call(layer, rank)
    x, idx, gates = inputs(4, [5, 0, 7, 2])
    mine = {"x": x[rank], "topk_idx": idx[rank], "topk_weights": gates[rank]}
    before = layer.stats.clone(), layer.sent.clone()
    odd = rank == 2

    def change(**other):
        return raised(lambda: layer(**({**mine, **other} if odd else mine)))[0]

    many, many_idx, many_gates = (part[0] for part in inputs(1, [9]))
    bad_id, bad_gate = idx[rank].clone(), gates[rank].clone()
    if odd:
        bad_id[3, 1], bad_gate[2, 0] = E, float("nan")
    found = [
        change(x=many, topk_idx=many_idx, topk_weights=many_gates),
        change(topk_idx=bad_id),
        change(topk_weights=bad_gate),
        change(x=x[rank].float()),
        change(
            topk_idx=idx[rank][:, :2].contiguous(), topk_weights=gates[rank][:, :2].contiguous()
        ),
        change(x="tokens " * 500),
        change(topk_weights=gates[rank].clone().requires_grad_()),
    ]
    assert torch.equal(before[0], layer.stats) and torch.equal(before[1], layer.sent)
    call(layer, rank, seed=1)
    call(copy.deepcopy(layer), rank)
    return found


def test_what_one_rank_may_not_do_is_refused_on_every_rank_and_the_next_call_works():
    one, *others = results(launch(4, refused))
    assert all(other == one for other in others)
    for text, words in zip(
        one,
        [
            "CapacityError: a call may hold at most max_tokens_per_rank = 8 tokens; got 9 on rank",
            "RangeError: rank 2: expert ids must lie between -1 (masked) and 7; got 8 at token 3",
            "RangeError: rank 2: topk_weights must be finite; got nan at token 2, slot 0",
            "DTypeError: rank 2: x must be bfloat16; got torch.float32",
            "ShapeError: rank 2: topk_idx must be [T, 3]; got (7, 2)",
            "DTypeError: rank 2: x must be a tensor or Quantized; got str",
            "NotAvailable: rank 2: the layer has no backward",
        ],
        strict=True,
    ):
        assert words in text, text


def out_of_order(rank):
    one, two = build(rank), build(rank)
    text, _ = raised(lambda: call((one, two)[rank], rank))
    call(one, rank)
    return text


def test_layers_called_in_another_order_are_refused():
    one, two = results(launch(2, out_of_order))
    assert one == two and "must call their layers in the same order; got layers [1, 2]" in one


# -- ranks that die, hang or fail ----------------------------------------------------------------


def killed_between_calls(rank):
    layer = build(rank)
    call(layer, rank)
    if rank == 1:
        die()
    if rank == 2:
        time.sleep(0.3)
    text, seconds = raised(call, layer, rank)
    again, at_once = raised(call, layer, rank)
    assert again == text and at_once < SOON_S
    return text, seconds


def killed_in_a_call(rank, step):
    layer = build(rank)
    call(layer, rank)
    if rank == 1:
        setattr(ReferenceCompute, step, lambda *args: die())
    return raised(call, layer, rank)


def killed_before_building(rank):
    if rank == 1:
        die()
    return raised(build, rank, timeout_s=BOUND_S)


@pytest.mark.parametrize(
    ("target", "args", "num_ranks", "words"),
    [
        (killed_between_calls, (), 4, "got rank 1 gone, as rank"),
        (killed_in_a_call, ("tokens",), 2, "in call 2 of layer 1, step counts"),
        (killed_in_a_call, ("rows",), 4, "in call 2 of layer 1, step rows home"),
        (killed_before_building, (), 4, "waited too long for rank 1 in step build the layer"),
    ],
    ids=["between calls", "quantising", "computing", "before building"],
)
def test_a_killed_rank_is_named_by_all_others_in_time(target, args, num_ranks, words):
    ends = launch(num_ranks, target, *args)
    assert ends[1].exitcode == -9 and ends[1].result is None
    left = [end for rank, end in enumerate(ends) if rank != 1]
    texts = {text for text, _ in results(left)}
    assert len(texts) == 1 or target is killed_before_building
    for text in texts:
        assert words in text and "rank 1" in text and "restart the ranks" in text, text
    assert all(seconds < BOUND_S + SLACK_S for _, seconds in results(left))


def killed_with_the_store(rank):
    layer = build(rank)
    call(layer, rank)
    if rank == 0:
        die()
    return raised(call, layer, rank), raised(layer.statistics)[0]


def test_a_killed_rank_that_held_the_store():
    ends = launch(4, killed_with_the_store, is_store_on_rank_0=True)
    for (text, seconds), asked in results(ends[1:]):
        assert text.startswith("RankError") and "restart the ranks" in text
        assert seconds < BOUND_S + SLACK_S
        assert asked.startswith("RankError: the group's store must be reachable")


def never_calls(rank):
    layer = build(rank, timeout_s=BOUND_S)
    call(layer, rank)
    if rank == 2:
        wait_until_given_up(0, 1, 3)
    text, seconds = raised(call, layer, rank)
    gave_up(rank)
    # The processes are well: a new layer makes new connections and works.
    call(build(rank), rank)
    return text, seconds


def test_a_rank_that_never_calls_is_named_in_time_and_a_new_layer_works():
    ends = results(launch(4, never_calls))
    assert len({text for text, _ in ends}) == 1
    text = ends[0][0]
    assert text.startswith("MegaMoETimeout: rank ")
    assert "waited too long for rank 2 in call 2 of layer 1, step counts (the bound is 2 s)" in text
    assert "got 0x" in text and "restart the ranks" in text
    waited = [ends[rank][1] for rank in (0, 1, 3)]
    assert BOUND_S - 0.2 < max(waited) < BOUND_S + SLACK_S
    assert ends[2][1] < SOON_S


def fails_in_a_call(rank):
    layer = build(rank)
    call(layer, rank)
    if rank == 1:

        def rows(*args):
            raise RuntimeError("out of memory, for example")

        ReferenceCompute.rows = rows
        try:
            call(layer, rank)
        except RuntimeError as error:
            return str(error), 0.0, ""
    text, seconds = raised(call, layer, rank)
    return text, seconds, raised(layer.statistics)[0]


def test_the_others_learn_of_a_rank_that_fails_inside_a_call():
    one, two, three, _ = results(launch(4, fails_in_a_call))
    assert two[0] == "out of memory, for example"
    assert one[0] == three[0] and "rank 1 failed in call 2 of layer 1, step experts" in one[0]
    assert "RuntimeError: out of memory" in one[0]
    assert one[1] < BOUND_S + SLACK_S and three[1] < BOUND_S + SLACK_S
    assert "rank 1 failed in call 2" in one[2]  # nobody waits for it later either


def comes_late(rank):
    layer = build(rank, timeout_s=10.0)
    for late in range(3):
        if rank == late:
            time.sleep(0.4)
        call(layer, rank)
    return True


def test_a_rank_may_come_late():
    assert results(launch(4, comes_late)) == [True] * 4


def test_what_is_no_group_is_refused():
    with pytest.raises(mm.MegaMoEError, match=r"torch\.distributed process group.*got object"):
        mm.MoE(experts("bf16"), E, K, group=object())
    assert issubclass(RankError, ConnectionError) and issubclass(CapacityError, RuntimeError)
    assert issubclass(RangeError, ValueError)
