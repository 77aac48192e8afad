"""The expert-sorted order: a worked example, and invariants over random routings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.errors import MegaMoEError
from megamoe.routing.permute import expert_counts, permute
from megamoe.routing.samplers import SKEWS, sample_routing
from megamoe.routing.spec import max_tiles


def test_a_worked_example():
    topk_idx = torch.tensor([[2, 0], [2, -1], [0, 2], [2, 2]])
    p = permute(topk_idx, num_experts=4, tile_m=2)
    assert p.counts.tolist() == [2, 0, 5, 0]
    assert p.offsets.tolist() == [0, 2, 2, 8, 8]
    assert p.num_non_exiting_tiles.tolist() == [4]
    # 8 slots over 4 experts in tiles of 2: at most 4 + (8 - 4) // 2 tiles
    assert p.tile_idx_to_group_idx.tolist() == [0, 2, 2, 2, -1, -1]
    assert p.tile_idx_to_mn_limit.tolist() == [2, 4, 6, 7, -1, -1]
    assert p.permuted_idx_to_expanded_idx.tolist() == [1, 4, 0, 2, 5, 6, 7, -1, -1, -1, -1, -1]
    assert p.expanded_idx_to_permuted_idx.tolist() == [2, 0, 3, -1, 1, 4, 5, 6]


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40),
    experts=st.integers(1, 20),
    top_k=st.integers(1, 8),
    tile=st.sampled_from([1, 2, 8, 16, 128]),
    seed=st.integers(0, 2**20),
)
def test_every_slot_has_one_row_in_its_experts_tiles(tokens, experts, top_k, tile, seed):
    rng = torch.Generator().manual_seed(seed)
    topk_idx = torch.randint(-1, experts, (tokens, top_k), generator=rng)
    p = permute(topk_idx, experts, tile)
    flat = topk_idx.flatten()
    rows = p.expanded_idx_to_permuted_idx
    assert torch.equal(rows < 0, flat < 0)
    used = rows[rows >= 0].long()
    assert len(used.unique()) == len(used)
    assert torch.equal(p.permuted_idx_to_expanded_idx[used].long(), (rows >= 0).nonzero().flatten())
    assert int((p.permuted_idx_to_expanded_idx >= 0).sum()) == len(used)
    # The tile maps alone, as a kernel reads them, give back each expert's rows in order.
    for tile_idx in range(int(p.num_non_exiting_tiles)):
        first, limit = tile_idx * tile, int(p.tile_idx_to_mn_limit[tile_idx])
        assert first < limit <= first + tile
        inside = p.permuted_idx_to_expanded_idx[first : first + tile]
        assert (inside[: limit - first] >= 0).all() and (inside[limit - first :] < 0).all()
        assert (flat[inside[: limit - first].long()] == p.tile_idx_to_group_idx[tile_idx]).all()
    assert (p.tile_idx_to_group_idx[int(p.num_non_exiting_tiles) :] == -1).all()
    for e in range(experts):
        rows_of_e = p.permuted_idx_to_expanded_idx[p.offsets[e] : p.offsets[e + 1]]
        rows_of_e = rows_of_e[rows_of_e >= 0].tolist()
        assert rows_of_e == (flat == e).nonzero().flatten().tolist()


@pytest.mark.parametrize("tile", [1, 3, 8])
def test_max_tiles_is_reached_and_never_passed(tile):
    for rows in range(12):
        for experts in range(1, 5):
            most = max(sum(-(-c // tile) for c in split) for split in _splits(rows, experts))
            assert most == max_tiles(rows, experts, tile)


def _splits(rows, parts):
    if parts == 1:
        return [(rows,)]
    return [(n, *rest) for n in range(rows + 1) for rest in _splits(rows - n, parts - 1)]


@pytest.mark.parametrize(
    ("topk_idx", "experts", "tile"),
    [
        (torch.tensor([[0, 4]]), 4, 1),
        (torch.tensor([[-2, 0]]), 4, 1),
        (torch.tensor([0, 1]), 4, 1),
        (torch.tensor([[0, 1]]), 4, 0),
    ],
)
def test_bad_routings_are_refused(topk_idx, experts, tile):
    with pytest.raises(MegaMoEError, match="got"):
        permute(topk_idx, experts, tile)


def test_an_id_out_of_range_is_named():
    topk_idx = torch.zeros(5, 3, dtype=torch.int64)
    topk_idx[3, 1] = 99
    topk_idx[4, 0] = -7
    with pytest.raises(MegaMoEError, match="99 at token 3, slot 1"):
        permute(topk_idx, 8)


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_samplers_give_distinct_experts_with_the_skew_they_name(skew, seed):
    idx, weights = sample_routing(400, 32, 4, skew=skew, num_ranks=8, seed=seed)
    assert idx.shape == weights.shape == (400, 4)
    assert (weights > 0).all() and torch.allclose(weights.sum(1), torch.ones(400))
    counts = expert_counts(idx, 32)
    if skew == "masked":
        assert (idx == -1).all() and counts.sum() == 0
        return
    assert counts.sum() == 1600
    assert all(len(set(row)) == 4 for row in idx.tolist())
    top = counts.max() / counts.float().mean()
    if skew == "uniform":
        assert top < 1.8
    elif skew == "hot_rank":
        assert (counts.view(8, 4).sum(1) > 0).sum() == 1
    elif skew == "hot_expert":
        assert counts.max() == 400 and counts.sort().values[-2] < 100
    else:
        assert top > 2.5


def test_samplers_repeat_with_their_seed_and_mask_their_share():
    a, _ = sample_routing(2000, 16, 4, skew="dirichlet", masked_ratio=0.25, seed=5)
    b, _ = sample_routing(2000, 16, 4, skew="dirichlet", masked_ratio=0.25, seed=5)
    c, _ = sample_routing(2000, 16, 4, skew="dirichlet", masked_ratio=0.25, seed=6)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert (a < 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    with pytest.raises(MegaMoEError, match="hot rank"):
        sample_routing(4, 8, 4, skew="hot_rank", num_ranks=4)
    with pytest.raises(MegaMoEError, match="skew"):
        sample_routing(4, 8, 4, skew="odd")
