"""`megamoe run --ranks R`: the layer over R processes of this machine, with gloo between them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from megamoe.engine.layer import MoE
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import RankError, require
from megamoe.problem import Options

TIMEOUT_S = 600.0
Tokens = tuple[Tensor, Tensor, Tensor]


def run_ranks(
    tokens: Sequence[Tokens],
    weights: ExpertWeights,
    shared: ExpertWeights | None,
    options: Options,
    progress: Callable[[int, int], None],
) -> tuple[list[Tensor], Tensor]:
    """(every rank's result, rows that each expert received): `MoE(group=...)` over processes.

    On a CPU they are forked, so that weights are not copied; CUDA does not survive a fork, so on a
    GPU they are new processes that map this one's memory. A rank that fails ends all of them. The
    store comes after the forks: its thread may hold a lock of libc (of name look-ups), which a
    process that is forked then would wait for in vain.
    """
    num = len(tokens)
    on_gpu = weights.device.type == "cuda"
    outputs = [torch.zeros_like(x).share_memory_() for x, _, _ in tokens]
    received = torch.zeros(weights.num_experts, dtype=torch.int64).share_memory_()
    context = multiprocessing.get_context("spawn" if on_gpu else "fork")
    processes, pipes = [], []
    for rank in range(num):
        mine, theirs = context.Pipe()
        parts = weights.for_rank(rank, num), shared, options, tokens[rank]
        local = received.chunk(num)[rank]
        process = context.Process(
            target=_rank, args=(rank, num, parts, (outputs[rank], local), theirs)
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    try:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_S), False)
        for pipe in pipes:
            pipe.send(store.port)
        _collect(pipes, progress)
    finally:
        for process in processes:
            process.kill() if process.is_alive() else None
            process.join()
    return outputs, received


def _collect(pipes: list[Connection], progress: Callable[[int, int], None]) -> None:
    """Until every rank has said that it is done; the first failure is raised."""
    left = list(pipes)
    while left:
        for pipe in wait(left, timeout=TIMEOUT_S) or [left[0]]:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                text = pipe.recv() if pipe.poll() else "no word within the bound"
            except EOFError:
                text = "the process ended"
            require(
                not text,
                "every rank must finish",
                got=f"rank {rank}: {text}",
                kind=RankError,
            )
            left.remove(pipe)
            progress(len(pipes) - len(left), len(pipes))


def _rank(
    rank: int,
    num: int,
    parts: tuple[ExpertWeights, ExpertWeights | None, Options, Tokens],
    results: tuple[Tensor, Tensor],
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)  # a forked process must not start the parent's thread pool
    try:
        weights, shared, o, tokens = parts
        store = dist.TCPStore(
            "127.0.0.1", pipe.recv(), None, False, timedelta(seconds=TIMEOUT_S),
            wait_for_workers=False,
        )  # fmt: skip
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num)
        layer = MoE(
            weights, weights.num_experts * num, tokens[1].shape[1], group=dist.group.WORLD,
            activation=o.activation, clamp=o.clamp, weight_at=o.weight_at, combine=o.combine,
            shared=shared, backend="reference", timeout_s=TIMEOUT_S,
        )  # fmt: skip
        y, received = results
        y.copy_(layer(*tokens))
        received.copy_(layer.stats)
        if y.is_cuda:
            torch.cuda.synchronize(y.device)
        dist.barrier()
        del layer, weights, shared, tokens, parts, y, results
        gc.collect()  # what this process maps, its owner may free
        pipe.send("")
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)
