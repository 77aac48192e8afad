"""Symmetric memory on pretended GPUs: which numbers torch sees, and where a block begins."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as torch_symmetric

from megamoe.distributed import symmetric
from megamoe.distributed.symmetric import OVERLAPPING
from megamoe.errors import NotAvailable


class Torch:
    """Stands for torch's symmetric memory of rank 0; `below`: bytes before the tensor."""

    def __init__(self, below=0):
        self.below, self.seen = below, []

    def empty(self, num_bytes, dtype, device):
        self.own = torch.zeros(num_bytes + self.below, dtype=dtype)[self.below :]
        return self.own

    def rendezvous(self, own, group):
        self.seen.append(os.environ.get(OVERLAPPING))
        start = own.data_ptr() - self.below
        blocks = [SimpleNamespace(data_ptr=lambda at=start + 4096 * r: at) for r in range(2)]
        return SimpleNamespace(get_buffer=lambda rank, shape, dtype: blocks[rank])


def share(monkeypatch, cards, fake):
    """Rank 0 shares with a rank whose card is the second."""
    monkeypatch.setattr(torch_symmetric, "empty", fake.empty)
    monkeypatch.setattr(torch_symmetric, "rendezvous", fake.rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(symmetric, "check_reach", lambda gpus: None)
    monkeypatch.setattr(symmetric, "_card", lambda device: cards[0])

    def gather(step, make):
        return [make(), cards[1]]

    rendezvous = SimpleNamespace(rank=0, num_ranks=2, group=None, gather=gather)
    return symmetric.share(rendezvous, 64, torch.device("cpu"))


@pytest.mark.parametrize(
    ("cards", "is_allowed", "ranks_here"),
    [
        ([["a", "one", 0], ["a", "two", 0]], True, 1),  # each process sees one GPU
        ([["a", "one", 0], ["a", "one", 0]], True, 2),  # one GPU
        ([["a", "one", 1], ["a", "one", 0]], False, 2),  # one GPU under two numbers
        ([["a", "one", 0], ["a", "two", 1]], False, 1),
    ],
)
def test_gpus_of_one_number_are_allowed_while_torch_maps_and_no_longer(
    monkeypatch, cards, is_allowed, ranks_here
):
    monkeypatch.delenv(OVERLAPPING, raising=False)
    fake = Torch()
    found = share(monkeypatch, cards, fake)
    assert fake.seen == ["1" if is_allowed else None] and OVERLAPPING not in os.environ
    assert found.ranks_here == ranks_here and found.offsets == (0, 4096)


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv(OVERLAPPING, "0")
    fake = Torch()
    share(monkeypatch, [["a", "one", 0], ["a", "two", 0]], fake)
    assert fake.seen == ["0"] and os.environ[OVERLAPPING] == "0"


def test_a_tensor_inside_a_block_is_refused(monkeypatch):
    with pytest.raises(NotAvailable, match="got a tensor 512 bytes into it"):
        share(monkeypatch, [["a", "one", 0], ["a", "two", 1]], Torch(below=512))
