"""Split on a Hopper GPU: the bits of staged calls, in a graph too, on SMs that nobody shares."""

import random
import time

import pytest
import torch
import triton
import triton.language as tl

import megamoe as mm
from megamoe.engine import partition
from megamoe.engine.planning import hardware_of
from megamoe.errors import MegaMoETimeout
from megamoe.kernels.hopper import launch
from tests.engine.test_chain_gpu import TILES
from tests.engine.test_fused_gpu import Crowd, K, base, same_bits
from tests.engine.test_hopper_gpu import IS_OTHER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_OTHER, reason="needs an sm_90 GPU; this is another"),
]

CUDA = torch.device("cuda")


def layer_of(crowd, **options):
    o = crowd.options
    return mm.MoE(
        crowd.weights, crowd.num, K, backend="hopper", mode="split", activation=o.activation,
        clamp=o.clamp, weight_at=o.weight_at, combine=o.combine, **options,
    )  # fmt: skip


@pytest.mark.parametrize("pool_rows", [None, 512])
@pytest.mark.parametrize("tile", TILES)
def test_split_has_the_bits_of_staged(tile, pool_rows):
    recipe, given = TILES[tile]
    crowd, rng = Crowd(recipe), random.Random(0)
    layer = layer_of(crowd, overrides=given, pool_rows=pool_rows)
    for call in range(8):
        inputs, wanted = crowd.pick(rng.choice((1, 7, 300, 700)), call)
        assert same_bits(layer(*inputs), wanted), call
    layer.check()


@pytest.mark.parametrize("l1_sms", [16, 80, 88, 104])
def test_every_partition_has_the_bits(l1_sms):
    crowd = base()
    inputs, wanted = crowd.pick(500)
    assert same_bits(layer_of(crowd, overrides={"l1_sms": l1_sms})(*inputs), wanted)


@pytest.mark.parametrize("tile", ["dynamic", "decoded-per-wave", "swap_ab"])
@pytest.mark.parametrize("pool_rows", [None, 512])
def test_one_graph_is_replayed_with_other_routing(tile, pool_rows):
    recipe, given = TILES[tile]
    crowd = Crowd(recipe)
    layer = layer_of(crowd, overrides=given, pool_rows=pool_rows)
    inputs, _ = crowd.pick(300)
    layer(*inputs)  # parts the SMs: not inside a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(*inputs)
    for call in range(200):
        others, wanted = crowd.pick(300, call)
        for t, other in zip(inputs, others, strict=True):
            t.copy_(other)
        graph.replay()
        assert same_bits(y, wanted), call
    layer.check()


def test_a_layers_own_graphs_and_eager_calls_take_turns():
    crowd = base()
    replayed, eager = layer_of(crowd, cuda_graphs=True), layer_of(crowd)
    for call in range(20):
        inputs, wanted = crowd.pick(1 + 13 * call, call)
        assert same_bits(replayed(*inputs), wanted) and same_bits(eager(*inputs), wanted)


def test_two_layers_on_two_streams_end():
    """Their calls share the streams of both parts."""
    crowd, streams = base(), [torch.cuda.Stream() for _ in range(2)]
    layers = [layer_of(crowd, pool_rows=rows) for rows in (None, 512)]
    torch.cuda.synchronize()
    for call in range(50):
        inputs, wanted = crowd.pick(400, call)
        torch.cuda.synchronize()
        got = []
        for layer, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(layer(*inputs))
        torch.cuda.synchronize()
        assert all(same_bits(y, wanted) for y in got)


@triton.jit
def _where(out, ns):
    """Programs that stay long enough to take every SM of their part: the SM of each."""
    number = tl.program_id(0)
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid; // $1", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
    )
    begin = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; // $1", "=l,r", [number], dtype=tl.int64, is_pure=False, pack=1
    )
    now = begin
    while now - begin < ns:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer; // $1", "=l,r", [number], dtype=tl.int64, is_pure=False,
            pack=1,
        )  # fmt: skip
    tl.store(out + number, sm)


@pytest.mark.parametrize("l1_sms", [16, 80, 88, 104])
def test_the_parts_share_no_sm(l1_sms):
    num = hardware_of(CUDA).num_sms
    sides = partition.fork(CUDA, l1_sms, num)
    seen = [torch.full((4 * num,), -1, dtype=torch.int32, device=CUDA) for _ in range(2)]
    for side, out in enumerate(seen):
        sides.run(side, lambda out=out: _where[(4 * num,)](out, 50_000, num_warps=8))
    sides.join()
    first, rest = (set(out.tolist()) for out in seen)
    assert (len(first), len(rest)) == (l1_sms, num - l1_sms) and not first & rest


def test_without_l1_a_call_ends_within_its_bound_and_the_next_is_right(monkeypatch):
    crowd = base()
    layer = layer_of(crowd, timeout_s=2.0)
    inputs, wanted = crowd.pick(300)
    assert same_bits(layer(*inputs), wanted)
    torch.cuda.synchronize()
    begin = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "gated", lambda *args, **rest: None)
        layer(*inputs)
        torch.cuda.synchronize()
    assert time.monotonic() - begin < 10.0
    with pytest.raises(MegaMoETimeout, match="tiles or weights of other CTAs"):
        layer.check()
    assert same_bits(layer(*inputs), wanted)
