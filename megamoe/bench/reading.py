"""Plain reads of a given number of bytes, the fastest of a few simple kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megamoe.bench.inputs import words
from megamoe.bench.timer import Prepared, Run, Timer
from megamoe.errors import MegaMoEError

# (chunks, words a chunk, warps): 32, 64 and 128 KiB a program
SHAPES = ((4, 2048, 4), (4, 4096, 8), (8, 4096, 8))


class Reader:
    """Reads of random words. One buffer serves all sizes, since only their number matters."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._words = torch.empty(0, dtype=torch.int32, device=device)

    def prepare(self, num_bytes: int, timer: Timer) -> Prepared:
        """One launch that reads `num_bytes`: the fastest variant in a short trial."""
        best: tuple[float, Prepared] | None = None
        for run in self._variants(self._take(num_bytes)):
            try:
                one = timer.prepare(run)
                us = timer.glance(one)
            except (RuntimeError, MegaMoEError):
                continue
            if best is None or us < best[0]:
                best = us, one
        assert best is not None, "torch.sum reads any buffer"
        return best[1]

    def _take(self, num_bytes: int) -> Tensor:
        count = max(num_bytes // 64, 1) * 16  # whole 64 bytes: loads stay 16 bytes wide
        if self._words.numel() < count:
            self._words = torch.empty(0, dtype=torch.int32, device=self.device)
            self._words = words(self.device, count)
        return self._words[:count]

    def _variants(self, words: Tensor) -> Iterator[Run]:
        yield lambda: torch.sum(words)
        if self.device.type != "cuda":
            return
        from megamoe.bench.read_kernel import read

        sums = torch.empty(-(-words.numel() // 8192) + 1, dtype=torch.int32, device=self.device)
        for chunks, chunk, warps in SHAPES:
            yield lambda chunks=chunks, chunk=chunk, warps=warps: read(  # type: ignore[misc]
                words, sums, chunks=chunks, chunk=chunk, num_warps=warps
            )
