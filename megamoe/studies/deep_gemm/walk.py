"""Walk: the order of `blocks` as the state machine that every role of every SM runs for itself.

No list of blocks exists on the device. Each warp role keeps a few integers and finds the next
block of its SM alone; since all roles run the same machine on the same counts, they see the same
sequence without talking to each other (A034).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megamoe.errors import RangeError, require
from megamoe.simulator.blocks import L1, L2, Block, num_m_blocks
from megamoe.studies.deep_gemm.blocks import Grid, block_mn, interleaved
from megamoe.studies.deep_gemm.capacity import ring_blocks, wave_end


class Walk:
    """One SM's blocks, one `next_block` at a time (A030-A033).

    `block_idx` counts from the start of the current expert's part. Past the part's end the part's
    blocks are subtracted and the walk moves to the next expert; past the wave's end it rewinds to
    the wave's start for L2, or goes on to the next wave. Subtracting, never resetting, carries
    the remainder over, so SM s takes blocks s, s + num_sms, ... of the whole order.
    """

    def __init__(
        self,
        grid: Grid,
        rows: Sequence[int],
        *,
        experts_per_wave: int,
        sm: int,
        num_sms: int,
        ring_rows: int | None = None,
        lag: int | None = None,
    ) -> None:
        require(
            0 <= sm < num_sms,
            "sm must lie in 0 .. num_sms - 1",
            got=f"{sm} of {num_sms}",
            kind=RangeError,
        )
        self._grid, self._rows, self._lag = grid, rows, lag
        self._experts_per_wave, self._num_sms = experts_per_wave, num_sms
        self._ring_blocks = ring_blocks(rows, grid.block_m, ring_rows)
        self._block_idx = sm
        self._wave = -1
        self._end = (0, 0)
        self._open_wave()

    def _open_wave(self) -> None:
        self._wave += 1
        self._start = self._end
        self._phase = L1
        self._expert, self._first_m = self._start
        if self._expert < len(self._rows):
            self._end = wave_end(
                self._rows,
                self._grid.block_m,
                self._experts_per_wave,
                self._ring_blocks,
                *self._start,
            )

    def _part_blocks(self) -> int:
        # row blocks of the current expert that belong to this wave
        if self._expert == self._end[0]:
            return self._end[1] - self._first_m
        return num_m_blocks(self._rows[self._expert], self._grid.block_m) - self._first_m

    def _in_wave(self) -> bool:
        return (self._expert, self._first_m) < self._end

    def next_block(self) -> Block | None:
        """The SM's next block; None when its work is done."""
        if self._lag is not None:
            return self._next_interleaved(self._lag)
        while self._start[0] < len(self._rows):
            while self._in_wave():
                num_n = self._grid.num_n(self._phase)
                num = self._part_blocks() * num_n
                if self._block_idx < num:
                    m, n = block_mn(self._block_idx, num_n)
                    self._block_idx += self._num_sms
                    return Block(self._wave, self._phase, self._expert, self._first_m + m, n)
                self._block_idx -= num
                self._expert, self._first_m = self._expert + 1, 0
            if self._phase == L1:
                self._phase = L2
                self._expert, self._first_m = self._start
            else:
                self._open_wave()
        return None

    def _next_interleaved(self, lag: int) -> Block | None:
        while self._start[0] < len(self._rows):
            num_m = self._wave_blocks()
            num = num_m * (self._grid.num_l1_n + self._grid.num_l2_n)
            if self._block_idx < num:
                is_l2, place, n = interleaved(
                    self._block_idx,
                    num_m,
                    self._grid.num_l1_n,
                    self._grid.num_l2_n,
                    min(lag, num_m),
                )
                self._block_idx += self._num_sms
                expert, m = self._locate(place)
                return Block(self._wave, L2 if is_l2 else L1, expert, m, n)
            self._block_idx -= num
            self._open_wave()
        return None

    def _wave_blocks(self) -> int:
        self._expert, self._first_m = self._start
        total = 0
        while self._in_wave():
            total += self._part_blocks()
            self._expert, self._first_m = self._expert + 1, 0
        return total

    def _locate(self, place: int) -> tuple[int, int]:
        self._expert, self._first_m = self._start
        while place >= self._part_blocks():
            place -= self._part_blocks()
            self._expert, self._first_m = self._expert + 1, 0
        return self._expert, self._first_m + place

    def __iter__(self) -> Iterator[Block]:
        while (block := self.next_block()) is not None:
            yield block
