"""Several ranks as processes over gloo, for tests: started once, bounded, never left behind."""

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")  # torch is imported once, not once a rank
CONTEXT.set_forkserver_preload(["tests.distributed.ranks", "megamoe.engine.layer"])


@dataclass
class End:
    """How one rank ended."""

    result: Any = None  # what the target returned
    error: str = ""  # "Type: text" of what it raised
    exitcode: int | None = None
    seconds: float = 0.0  # of the target


def die() -> None:
    """End this process as a crash does: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def launch(
    num_ranks: int, target: Any, *args: Any, limit_s: float = 60.0, is_store_on_rank_0: bool = False
) -> list[End]:
    """target(rank, *args) on every rank. Ranks that outlive `limit_s` are killed and say so."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), False)
    port = store.port
    if is_store_on_rank_0:
        del store
    pipes, processes = [], []
    for rank in range(num_ranks):
        mine, theirs = CONTEXT.Pipe(duplex=False)
        has_store = is_store_on_rank_0 and rank == 0
        process = CONTEXT.Process(
            target=_rank, args=(rank, num_ranks, port, has_store, theirs, target, args)
        )
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    ends = [End() for _ in processes]
    deadline = time.monotonic() + limit_s
    for end, pipe, process in zip(ends, pipes, processes, strict=True):
        process.join(max(deadline - time.monotonic(), 0.1))
        if process.is_alive():
            end.error = "still running"
            process.kill()
            process.join()
        elif pipe.poll():
            with suppress(EOFError):  # it said nothing: killed
                end.result, end.error, end.seconds = pipe.recv()
        end.exitcode = process.exitcode
        pipe.close()
        process.close()
    assert not multiprocessing.active_children()
    return ends


def _rank(
    rank: int, num_ranks: int, port: int, has_store: bool, pipe: Any, target: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, has_store, timedelta(seconds=30), False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    _wait_for_all(store, num_ranks)
    start, result, error = time.monotonic(), None, ""
    try:
        result = target(rank, *args)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    # Small enough for the pipe's buffer: nobody reads before this rank has ended.
    pipe.send((result, error, time.monotonic() - start))
    if not error:
        dist.destroy_process_group()


def _wait_for_all(store: dist.Store, num_ranks: int) -> None:
    """Wait for the slowest: a rank whose target dies would break the others' connecting."""
    if store.add("connected", 1) == num_ranks:
        store.set("all connected", "")
    store.wait(["all connected"])
