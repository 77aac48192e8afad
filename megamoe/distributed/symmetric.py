"""Memory that all ranks of a group on one host reach: torch's symmetric memory, bounded."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.distributed.rendezvous import Rendezvous, named
from megamoe.errors import NotAvailable, require

# Containers on several hosts may have one name, and torch's rendezvous would wait without bound.
BOOT_ID = "/proc/sys/kernel/random/boot_id"
# torch refuses ranks of one host whose GPUs have the same number: one GPU for several ranks, or
# processes that see one GPU each, which is number 0 to all of them. This variable lets them pass.
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Shared(NamedTuple):
    """One rank's part, and where the others' lie."""

    own: Tensor  # uint8, zero
    offsets: tuple[int, ...]  # by rank: bytes from a place in `own` to the same place there
    ranks_here: int  # that use this rank's GPU
    handle: Any  # keeps the mapping


def share(rendezvous: Rendezvous, num_bytes: int, device: torch.device) -> Shared:
    """`num_bytes` on every rank, zeroed, mapped on all of them; all ranks call it, or all fail."""
    gpus = rendezvous.gather("look at the GPUs", lambda: _card(device))
    rendezvous.gather("reach the GPUs", lambda: check_reach(gpus))
    ranks_here = sum(gpu[:2] == gpus[rendezvous.rank][:2] for gpu in gpus)
    allocated: list[Any] = []

    def allocate() -> None:
        import torch.distributed._symmetric_memory as symmetric

        allocated.append(symmetric.empty(num_bytes, dtype=torch.uint8, device=device).zero_())
        torch.cuda.synchronize(device)

    def map_peers() -> list[int]:
        import torch.distributed._symmetric_memory as symmetric

        with _overlapping_allowed(gpus):
            allocated.append(symmetric.rendezvous(allocated[0], rendezvous.group))
        return _offsets(allocated[1], allocated[0], rendezvous.rank, rendezvous.num_ranks)

    # Two gathers: torch's rendezvous has no bound of its own, so all begin it or none does.
    rendezvous.gather("allocate symmetric memory", allocate)
    offsets = rendezvous.gather("map symmetric memory", map_peers)[rendezvous.rank]
    return Shared(allocated[0], tuple(offsets), ranks_here, allocated[1])


def _card(device: torch.device) -> list[Any]:
    """Host, GPU, the GPU's number in this process, and what tells hosts of one name apart."""
    properties = torch.cuda.get_device_properties(device)
    return [socket.gethostname(), str(properties.uuid), device.index, _boot_id()]


def _boot_id() -> str:
    """Of the running kernel, "" where it cannot be read. Containers of one host have the same."""
    try:
        return Path(BOOT_ID).read_text().strip()
    except OSError:
        return ""


@contextmanager
def _overlapping_allowed(gpus: list[list[Any]]) -> Iterator[None]:
    """While torch maps: the variable is set where numbers collide, and is afterwards as it was."""
    numbers = [(gpu[0], gpu[2]) for gpu in gpus]
    if len(set(numbers)) == len(numbers) or OVERLAPPING in os.environ:
        yield
        return
    os.environ[OVERLAPPING] = "1"
    try:
        yield
    finally:
        os.environ.pop(OVERLAPPING, None)


def _offsets(handle: Any, own: Tensor, rank: int, num_ranks: int) -> list[int]:
    """By rank, bytes from a place in `own` to the same place there.

    Buffers of a handle are whole blocks: the tensor must be its block's first, or two layers would
    share memory.
    """
    addresses = [handle.get_buffer(r, (1,), torch.uint8).data_ptr() for r in range(num_ranks)]
    require(
        addresses[rank] == own.data_ptr(),
        "symmetric memory must begin where its block begins",
        got=f"a tensor {own.data_ptr() - addresses[rank]} bytes into it",
        fix="allocate it outside torch's symmetric memory pools, or use mode='staged'",
        kind=NotAvailable,
    )
    return [at - own.data_ptr() for at in addresses]


def check_reach(gpus: list[list[Any]]) -> None:
    """Require ranks on one host, whose GPUs reach each other."""
    host, boot = gpus[0][0], next((gpu[-1] for gpu in gpus if gpu[-1]), "")
    elsewhere = [
        rank for rank, (name, *_, booted) in enumerate(gpus)
        if name != host or (booted and booted != boot)
    ]  # fmt: skip
    require(
        not elsewhere,
        "fused calls need all ranks on one host",
        got=f"{named(elsewhere)} on another host than rank 0" if elsewhere else "",
        fix="use mode='staged' across hosts",
        kind=NotAvailable,
    )
    here = {str(torch.cuda.get_device_properties(i).uuid): i for i in _devices()}
    devices = sorted({here[gpu[1]] for gpu in gpus if gpu[1] in here})
    apart = [
        (one, two)
        for one in devices
        for two in devices
        if one != two and not torch.cuda.can_device_access_peer(one, two)
    ]
    require(
        not apart,
        "fused calls need GPUs that reach each other's memory",
        got=f"none between {', '.join(f'cuda:{a} and cuda:{b}' for a, b in apart)}",
        fix="use mode='staged'",
        kind=NotAvailable,
    )


def _devices() -> range:
    return range(torch.cuda.device_count())
