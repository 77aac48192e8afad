"""Fill Triton's disk cache for layers, in several processes, without a GPU.

Each process finds the layers' kernels by itself (`recording`, a second) and compiles those that it
is asked for by hash: nothing but names travels. They are processes of their own, not threads:
the compiler holds the interpreter's lock, and a process that uses a GPU keeps its own driver.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

from megamoe.engine.recording import LayerSpec, Work, cubins_of_all
from megamoe.errors import NotAvailable, RangeError, require


class Compiled(NamedTuple):
    """What was done: cubins that the layer needs, those that were there, and the time."""

    num: int
    num_found: int
    seconds: float

    def __str__(self) -> str:
        new = self.num - self.num_found
        return f"{self.num} cubins, {new} compiled in {self.seconds:.1f} s"


def compile_layer(
    layer: LayerSpec,
    token_counts: Sequence[int],
    *,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Compiled:
    """Compile what calls of these sizes need and the disk cache lacks; arguments as below."""
    return compile_layers([(layer, token_counts)], processes=processes, progress=progress)


def compile_layers(
    works: Sequence[Work],
    *,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Compiled:
    """Compile what calls of several layers need and the disk cache lacks, each kernel once.

    works      layers, each with the numbers of tokens of its calls
    processes  that compile; None: one per core
    progress   called with (done, of)
    """
    require(
        processes is None or processes >= 1, "there must be a process", got=processes,
        kind=RangeError,
    )  # fmt: skip
    start = time.monotonic()
    with _Worker(works) as first:
        cubins: list[dict[str, Any]] = first.read()["cubins"]
        wanted = [one["hash"] for one in cubins if not one["is_there"]]
        done = len(cubins) - len(wanted)
        if progress is not None:
            progress(done, len(cubins))
        num = min(processes or os.cpu_count() or 1, len(wanted))
        others = [_Worker(works) for _ in range(num - 1)]
        if wanted:
            _share(wanted, [first, *others], progress, done, len(cubins))
    return Compiled(len(cubins), done, time.monotonic() - start)


def _share(
    wanted: Sequence[str], workers: Sequence[_Worker],
    progress: Callable[[int, int], None] | None, done: int, total: int,
) -> None:  # fmt: skip
    """Have the workers take one hash after the other."""
    left, lock = list(reversed(wanted)), threading.Lock()
    failed: list[BaseException] = []
    num_done = [done]

    def feed(worker: _Worker) -> None:
        try:
            with worker:
                if worker is not workers[0]:
                    worker.read()
                while True:
                    with lock:
                        if not left or failed:
                            break
                        one = left.pop()
                    worker.ask(one)
                    with lock:
                        num_done[0] += 1
                        if progress is not None:
                            progress(num_done[0], total)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=feed, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


class _Worker:
    """A process that compiles one hash a line."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megamoe.engine.precompile"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stderr is not None
        self._last_lines: list[str] = []  # the end of what it said of errors
        self._listener = threading.Thread(
            target=_collect, args=(self._process.stderr, self._last_lines), daemon=True
        )
        self._listener.start()
        asked = [{"layer": one.as_dict(), "tokens": list(tokens)} for one, tokens in works]
        self._write(json.dumps(asked))

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """End it; what it was compiling is written whole or not at all."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()

    def ask(self, hash_of_one: str) -> dict[str, Any]:
        """Compile one, and wait for it."""
        self._write(hash_of_one)
        return self.read()

    def read(self) -> dict[str, Any]:
        """Its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._listener.join(5.0)
        require(
            bool(line),
            "a compiling process must end its work",
            got="".join(self._last_lines[-8:]).strip() or f"exit code {self._process.returncode}",
            kind=NotAvailable,
        )
        message: dict[str, Any] = json.loads(line)
        return message

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `read` says why it ended


def _collect(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line)
        del lines[:-40]


def work() -> None:
    """A worker: layers on standard input, then hashes; a line of JSON for each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    asked = json.loads(sys.stdin.readline())
    cubins = cubins_of_all([(LayerSpec.from_dict(one["layer"]), one["tokens"]) for one in asked])
    by_hash = {one.hash: one for one in cubins}
    kernels: list[dict[str, Any]] = [
        {"kernel": one.kernel, "hash": one.hash, "is_there": one.is_there} for one in cubins
    ]
    _say(out, {"cubins": kernels})
    for line in sys.stdin:
        by_hash[line.strip()].compile()
        _say(out, {})


def _say(out: IO[str], what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


if __name__ == "__main__":
    work()
