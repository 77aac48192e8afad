"""GroupWorld: 2 and 4 processes over gloo give the bits of the reference and of one rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import megamoe as mm
from megamoe import reference
from megamoe.balance.placement import Placement, propose
from megamoe.distributed.placement import Places, replica_hash
from megamoe.distributed.wire import Wire
from megamoe.engine.row_counts import row_counts
from megamoe.formats.spec import recipe_named
from megamoe.problem import RECIPES, Options
from megamoe.routing.permute import expert_counts
from megamoe.routing.samplers import sample_routing
from tests.distributed.ranks import launch

H, I, E, K = 96, 64, 8, 3
COUNTS = [5, 0, 7, 2]  # tokens by rank
HOT = [100.0, 1, 2, 1, 50, 1, 1, 3]  # loads that call for replicas
WAIT_S = 20.0


def experts(recipe, num=E, seed=0, **extra):
    rng = torch.Generator().manual_seed(seed)
    w13 = (torch.randn(num, 2 * I, H, generator=rng) / H**0.5).bfloat16()
    w2 = (torch.randn(num, H, I, generator=rng) / I**0.5).bfloat16()
    return mm.ExpertWeights.quantize(w13, w2, recipe, **extra)


def biased(recipe):
    rng = torch.Generator().manual_seed(5)
    b13, b2 = torch.randn(E, 2 * I, generator=rng) / 8, torch.randn(E, H, generator=rng) / 8
    return experts(recipe, b13=b13.bfloat16(), b2=b2.bfloat16())


def inputs(num_ranks, counts=COUNTS, **options):
    parts = []
    for rank, num in enumerate(counts[:num_ranks]):
        x = torch.randn(num, H, generator=torch.Generator().manual_seed(rank)).bfloat16()
        parts.append((x, *sample_routing(num, E, K, seed=rank, num_ranks=num_ranks, **options)))
    return [list(part) for part in zip(*parts, strict=True)]


# -- what runs on every rank ---------------------------------------------------------------------


def check(weights, given=None, options=None, shared=None, placement=None, **routing):
    """Assert this rank's bits, its statistics, and those of all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x, idx, gates = given or inputs(num_ranks, **{"masked_ratio": 0.2, **routing})
    place = placement or Placement.contiguous(E, num_ranks)
    options = options or Options()
    layer = mm.MoE(
        weights.take(place.slots[rank]), E, K, group=dist.group.WORLD, shared=shared,
        placement=placement, timeout_s=WAIT_S, activation=options.activation, clamp=options.clamp,
        weight_at=options.weight_at, combine=options.combine, backend="reference",
    )  # fmt: skip
    y = layer(x[rank], idx[rank], gates[rank])
    owners = [weights.for_rank(r, num_ranks) for r in range(num_ranks)]
    wanted = reference.expert_parallel(x, idx, gates, owners, options, shared)[rank]
    assert y.dtype == torch.bfloat16 and torch.equal(y, wanted)
    alone = reference.moe(x[rank], idx[rank], gates[rank], weights, options, shared)
    assert torch.equal(y, alone)
    found = layer.statistics()
    sent = torch.tensor(found.sent)
    assert torch.equal(sent, torch.stack([expert_counts(i, E) for i in idx]))
    assert torch.equal(torch.tensor(found.received[rank]), layer.stats)
    total = torch.zeros(E, dtype=torch.int64)
    for held, rows in zip(place.slots, found.received, strict=True):
        total.index_add_(0, torch.tensor(held), torch.tensor(rows))
    assert torch.equal(total, sent.sum(0)) and found.logical == tuple(total.tolist())
    if placement is None:
        assert torch.equal(torch.tensor(found.received), reference.received(idx, E, num_ranks))
    return layer


def nothing(num_ranks, spoil):
    x, idx, gates = inputs(num_ranks)
    return spoil(x, idx, gates)


def all_to_one(x, idx, gates):
    return x, [torch.full_like(i, 5) for i in idx], gates


def all_masked(x, idx, gates):
    nan = [torch.full_like(g, float("nan")) for g in gates]  # never read
    return x, [torch.full_like(i, -1) for i in idx], nan


def twice(x, idx, gates):
    return x, [i[:, [0, 1, 0]].contiguous() for i in idx], gates


def int32(x, idx, gates):
    return x, [i.int() for i in idx], gates


def strided(x, idx, gates):
    wide = [torch.zeros(len(t), 2 * H, dtype=torch.bfloat16) for t in x]
    for w, t in zip(wide, x, strict=True):
        w[:, :H] = t
    return [w[:, :H] for w in wide], idx, gates


def quantised(recipe, x, idx, gates):
    """Even ranks bring quantised tokens, odd ranks BF16 ones: the wire is the same."""
    name = recipe_named(recipe).acts.name
    return [mm.quantize(t, name) if r % 2 == 0 else t for r, t in enumerate(x)], idx, gates


def own_globals(x, idx, gates):
    """NVFP4 tokens, each with a global scale of its own."""
    g = [torch.linspace(0.5, 2.0, len(t)) for t in x]
    pairs = zip(x, g, strict=True)
    return [mm.quantize(t, "nvfp4", global_scale=s) for t, s in pairs], idx, gates


def every_case(rank):
    """The names of the cases that ran; the first wrong one raises."""
    num_ranks = dist.get_world_size()
    cases = {f"recipe {r}": partial(check, experts(r)) for r in RECIPES}
    for recipe in ("bf16", "w4a8", "w4a8_block", "nvfp4"):
        given = partial(nothing, num_ranks, partial(quantised, recipe))
        cases[f"quantised {recipe}"] = lambda r=recipe, g=given: check(experts(r), g())
    for name, spoil in {
        "all to one": all_to_one, "all masked": all_masked, "twice": twice, "int32": int32,
        "strided": strided,
    }.items():  # fmt: skip
        cases[name] = lambda s=spoil: check(experts("w4a8"), nothing(num_ranks, s))
    cases["no tokens"] = lambda: check(experts("w4a8"), inputs(num_ranks, [0] * 4))
    cases["one token"] = lambda: check(experts("w8a8"), inputs(num_ranks, [0, 1, 0, 0]))
    for skew in ("hot_expert", "zipf"):
        cases[skew] = lambda s=skew: check(experts("w4a4"), skew=s)
    for activation in ("swiglu", "gpt_oss"):
        for weight_at in ("l1", "combine"):
            for combine in ("bf16", "fp8"):
                options = Options(activation, 2.0, weight_at, combine)
                cases[str(options)] = lambda o=options: check(
                    biased("w4a16"), options=o, shared=experts("w8a8", num=2, seed=9)
                )
    globals_ = {"x_global": 0.37, "acts_global": torch.linspace(0.01, 0.02, E)}
    cases["global scales"] = lambda: check(experts("nvfp4", **globals_))
    cases["own globals"] = lambda: check(experts("nvfp4"), nothing(num_ranks, own_globals))
    spare = propose(HOT, num_ranks, E // num_ranks + 2)
    assert not spare.is_contiguous and max(map(len, spare.replicas())) > 1
    cases["replicas"] = lambda: check(experts("w4a8"), placement=spare)
    cases["replicas, skew"] = lambda: check(experts("bf16"), placement=spare, skew="hot_expert")
    everywhere = Placement(E, (tuple(range(E)),) * num_ranks)
    cases["every expert everywhere"] = lambda: check(experts("w8a8"), placement=everywhere)
    for name, case in cases.items():
        try:
            case()
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error
    return len(cases)


def many_calls(rank):
    """One layer, many calls: other batches, other sizes, statistics added up."""
    num_ranks = dist.get_world_size()
    weights = experts("w4a8")
    layer = mm.MoE(weights.for_rank(rank, num_ranks), E, K, group=dist.group.WORLD,
                   timeout_s=WAIT_S, max_tokens_per_rank=12)  # fmt: skip
    total = torch.zeros(num_ranks, E // num_ranks, dtype=torch.int64)
    for call in range(12):
        counts = [(3 * call + 5 * r) % 13 for r in range(num_ranks)]
        x, idx, gates = inputs(num_ranks, counts, masked_ratio=0.1)
        y = layer(x[rank], idx[rank], gates[rank])
        assert torch.equal(y, reference.moe(x[rank], idx[rank], gates[rank], weights))
        total += reference.received(idx, E, num_ranks)
        assert torch.equal(layer.stats, total[rank])
    new = experts("w4a8", seed=1)
    mine = new.for_rank(rank, num_ranks).dequantize()  # rounds to the same bits
    spoiled = mine[1].masked_fill(torch.tensor(rank == 1), torch.nan)
    with pytest.raises(mm.MegaMoEError, match="rank 1, step refresh: w2 must be finite"):
        layer.refresh(mine[0], spoiled)
    y = layer(x[rank], idx[rank], gates[rank])
    assert torch.equal(y, reference.moe(x[rank], idx[rank], gates[rank], weights))  # none wrote
    layer.refresh(*mine)
    y = layer(x[rank], idx[rank], gates[rank])
    assert torch.equal(y, reference.moe(x[rank], idx[rank], gates[rank], new))
    return True


def assert_bytes_are_of_distinct_pairs(layer, mine, wanted, num_ranks):
    """A token goes once to each rank that needs it, as the recipe has it; home, a row a slot."""
    sent, real = [], dist.all_to_all_single

    def counted(into, out, num_in, num_out, group):
        sent.append((out.shape[0], sum(num_out), out.nbytes, into.nbytes))
        return real(into, out, num_in, num_out, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        assert torch.equal(layer(*mine), wanted)
    idx = mine[1]
    owner = idx // (E // num_ranks)
    pairs = {(t, r) for t, row in enumerate(owner.tolist()) for r in row if r >= 0}
    slots = int((idx >= 0).sum())
    assert len(pairs) < slots  # some experts of a token share a rank
    (tokens, num_tokens, token_bytes, _), (num, _, slot_bytes, _), (*_, home_bytes) = sent
    assert tokens == num_tokens == len(pairs) and num == slots
    assert token_bytes == 112 * len(pairs)  # MXFP8: 96 codes, 3 scales, to whole 16 bytes
    assert (slot_bytes, home_bytes) == (12 * slots, 2 * H * slots)


def other_ways(rank, folder):
    """A subgroup in another order, the collective, a compiled model, warm-up, files."""
    num_ranks, weights = dist.get_world_size(), experts("w4a8")
    x, idx, gates = inputs(num_ranks, [4] * num_ranks)
    mine = x[rank], idx[rank], gates[rank]
    wanted = reference.moe(*mine, weights)
    layer = mm.MoE(
        weights.for_rank(rank, num_ranks), E, K, group=dist.group.WORLD, timeout_s=WAIT_S
    )
    mm.warmup(layer, [1, 16], timeout_s=WAIT_S)
    assert not layer.stats.any()
    layer._world._transport = "collective"
    assert_bytes_are_of_distinct_pairs(layer, mine, wanted, num_ranks)
    layer._world._transport = None
    one_compiles = torch.compile(layer, fullgraph=True, backend="eager") if rank == 0 else layer
    assert torch.equal(one_compiles(*mine), wanted)
    assert torch.equal(one_compiles(*mine, max_tokens=4), wanted)
    for bad, text in ((3, "at most max_tokens = 3 tokens; got 4"), (-1, "must lie between 0")):
        with pytest.raises(mm.CapacityError, match=text):  # staged: what one refuses, all refuse
            layer(*mine, max_tokens=bad)
    layer.save_stats(f"{folder}/stats.json")
    pair = dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    two = mm.MoE(weights.for_rank(rank % 2, 2), E, K, group=pair, timeout_s=WAIT_S)
    assert torch.equal(two(*mine), wanted)
    assert f"{E // 2} experts on rank {rank % 2} of 2" in repr(two)
    again = mm.MoE(
        weights.for_rank(rank, num_ranks), E, K, group=dist.group.WORLD, timeout_s=WAIT_S
    )
    assert again._world.link is layer._world.link  # layers of the same ranks share connections
    assert torch.equal(again(*mine), layer(*mine))
    alone = mm.MoE(weights, E, K, group=dist.new_group([rank], use_local_synchronization=True))
    assert torch.equal(alone(*mine), wanted) and torch.equal(alone.sent, alone.stats)
    return layer.stats.tolist()


def results(ends):
    for end in ends:
        assert end.error == "" and end.exitcode == 0, ends
    return [end.result for end in ends]


# -- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_case_gives_the_bits_of_the_reference_and_of_one_rank(num_ranks):
    counts = results(launch(num_ranks, every_case))
    assert counts == [counts[0]] * num_ranks and counts[0] >= 30


def test_many_calls_of_one_layer():
    assert results(launch(2, many_calls)) == [True] * 2


def test_other_groups_transports_and_models(tmp_path):
    received = results(launch(4, other_ways, str(tmp_path)))
    from megamoe.balance.statistics import Statistics

    found = Statistics.load(tmp_path / "stats.json")
    assert (found.hidden, found.intermediate, found.top_k, found.recipe) == (H, I, K, "w4a8")
    assert sum(found.logical) == 3 * 4 * 4 * K == sum(map(sum, found.received))
    assert [4 * n for rank in found.received for n in rank] == [3 * n for r in received for n in r]


def test_one_rank_keeps_statistics_too(tmp_path):
    layer = mm.MoE(experts("bf16"), E, K)
    (x,), (idx,), (gates,) = inputs(1)
    layer(x, idx, gates)
    layer.save_stats(tmp_path / "stats.json")
    found = layer.statistics()
    assert found.sent == found.received == (tuple(expert_counts(idx, E).tolist()),)
    mm.warmup(layer, [4])
    assert found == layer.statistics()
    with pytest.raises(mm.MegaMoEError, match=r"integers from 0 on; got \[-1\]"):
        mm.warmup(layer, [4, -1])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_travel_as_they_are(recipe, rows):
    name = recipe_named(recipe).acts.name
    q = mm.quantize(torch.randn(rows, H).bfloat16(), name)
    wire = Wire(name, H)
    words = wire.pack(q)
    assert words.shape == (rows, wire.row_bytes // 4) and wire.row_bytes % 16 == 0
    back = wire.unpack(words)
    assert back.shape == q.shape and torch.equal(mm.dequantize(back), mm.dequantize(q))
    for part, t in q.tensors().items():
        found = getattr(back, part)
        if part == "global_scale":
            assert found.shape == (rows,) and bool((found == t).all())
        else:
            assert torch.equal(found.view(torch.uint8), t.view(torch.uint8))


def test_a_replica_depends_on_rank_row_and_expert_alone():
    place = propose(HOT, 4, 4)
    places = Places(place, torch.device("cpu"))
    idx = sample_routing(64, E, K, seed=3)[0]
    whole = places.physical(idx, 2)
    owner = [e for row in place.slots for e in row]
    assert torch.equal(torch.tensor(owner)[whole], idx)
    for cut in (1, 17):
        assert torch.equal(places.physical(idx[:cut], 2), whole[:cut])
    other = idx.clone()
    other[1:] = other[1:].flip(1)
    assert torch.equal(places.physical(other, 2)[0], whole[0])
    assert torch.equal(places.physical(other, 2)[1:], whole[1:].flip(1))
    same = places.physical(torch.full((50, 2), 0), 1)
    assert torch.equal(same[:, 0], same[:, 1]) and len(same.unique()) == len(place.replicas()[0])
    assert places.physical(torch.tensor([[-1, E, -7]]), 0).tolist() == [[-1, -1, -1]]


def test_replicas_share_alike():
    for copies in (2, 3, 4, 8):
        for expert in range(5):
            chosen = replica_hash(3, torch.arange(8192), torch.tensor(expert)) % copies
            counts = torch.bincount(chosen, minlength=copies)
            assert counts.min() > 0.9 * 8192 / copies
    assert replica_hash(0, torch.tensor(2**20), torch.tensor(1)) >= 0


def test_warm_up_reaches_every_size():
    sizes = list(row_counts(24, 4))
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and 24 in sizes and max(sizes) <= 96
    assert any(n % 16 == 0 for n in sizes) and any(n > 1 and n % 16 for n in sizes)
    assert list(row_counts(0, 4)) == []
