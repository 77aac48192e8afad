"""Whether bytes that a copy was made from are still those bytes (decision 0026).

torch counts in-place writes per tensor, but not all of them: tensors made under
`torch.inference_mode` have no counter, and writes through `.data`, through another alias of the
memory or by a kernel of one's own pass it by. So copies are kept under a seal: the counters where
they exist, and the content.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megamoe.errors import RangeError, require

WHOLE_BYTES = 64 << 20  # on a CPU, tensors up to this size are read whole: 30 ms at most
LOOK_EVERY = 256  # on a GPU a look at the content is a few launches: rare, and never captured
POSITIONS = 8  # per dimension after the first: 64 or more values of every expert's matrix
_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def counted(t: Tensor) -> Tensor:
    """A tensor over the same memory whose writes are counted: `t`, or an alias of an inference one.

    >>> with torch.inference_mode():
    ...     t = torch.zeros(2)
    >>> u = counted(t)
    >>> u.is_inference(), u.data_ptr() == t.data_ptr(), counted(u) is u
    (False, True, True)
    """
    if not t.is_inference():
        return t
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=t.dtype, device=t.device)
        return alias.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def counter_of(t: Tensor) -> Tensor:
    """A tensor without memory that counts the writes to `t`."""
    keep_version = torch.autograd.grad_mode._unsafe_preserve_version_counter
    with torch.no_grad(), torch.inference_mode(False), keep_version(t):
        alias = t.detach()  # counts with `t`; a view would keep it alive
        none = torch.empty(0, dtype=t.dtype, device=t.device).untyped_storage()
        alias.set_(none, 0, (0,), (1,))
    return alias


class Seal:
    """What some tensors held when something was made from them.

    A CPU's tensors are looked at in every call: up to WHOLE_BYTES whole, larger ones at POSITIONS.
    A GPU's counters are compared in every call, its content at POSITIONS in every LOOK_EVERY-th,
    on the device: what that finds travels to the host by itself, and a later call raises it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        require(
            not any(t.is_cuda and t.is_inference() for t in tensors),
            "weights on a GPU must be tensors whose writes torch counts",
            got="tensors made under torch.inference_mode",
            fix="make them outside of it, or clone them under torch.inference_mode(False)",
            kind=RangeError,
        )
        self._is_gpu = any(t.is_cuda for t in tensors)
        self._counters = _counters(tensors)
        self._content = [_content(t) for t in tensors]
        self._calls = 0
        self._differs: Tensor | None = None  # pinned: whether a look found other bytes

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they hold it still; False where what was made must be made anew.

        Raises where calls since the last look may have used something that was out of date.
        """
        return self._counters == _counters(tensors) and self.content_holds(lambda: tensors)

    def content_holds(self, find: Callable[[], Sequence[Tensor] | None]) -> bool:
        """The same without counters.

        find  called when it is time to look: the tensors, or None if some are gone
        """
        self._calls += 1
        if self._differs is not None and bool(self._differs):
            self._refuse_unless(False)
        is_time = not self._is_gpu or self._calls % LOOK_EVERY == 0
        if not is_time or (self._is_gpu and torch.cuda.is_current_stream_capturing()):
            return True
        tensors = find()
        if tensors is None:
            return True
        if not self._is_gpu:
            return self._is_same(tensors)
        self._look(tensors)
        return True

    def _look(self, tensors: Sequence[Tensor]) -> None:
        """Compare on the device; nothing waits."""
        if self._differs is None:
            is_gpu = tensors[0].device.type == "cuda"
            self._differs = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=is_gpu)
        differ = [
            torch.as_tensor(a != _content(t)).any()
            for a, t in zip(self._content, tensors, strict=True)
        ]
        self._differs.copy_(torch.stack(differ).any(), non_blocking=True)

    def verify(self, tensors: Sequence[Tensor]) -> None:
        """Look now, and refuse weights that were written to without being counted."""
        self._refuse_unless(self._is_same(tensors))

    def _refuse_unless(self, is_same: bool) -> None:
        require(
            is_same,
            "weights that were packed must change where torch counts it, or not at all",
            got=f"other bytes at one address and one version, some time in {LOOK_EVERY} calls",
            fix="write with w.copy_(...), not through w.data or an older alias; or make the "
            "layer anew after such a write (docs/decisions/0026-prepared-weights.md)",
            kind=RangeError,
        )

    def _is_same(self, tensors: Sequence[Tensor]) -> bool:
        if all(t.is_meta for t in tensors):
            return True  # they have no bytes
        now = map(_content, tensors)
        return all(
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
            for a, b in zip(self._content, now, strict=True)
        )


def _counters(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Address and version of each; an inference tensor has no version."""
    return [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors]


def _content(t: Tensor) -> Tensor | int:
    """A checksum of all bytes, or the values at some positions of every leading index."""
    words = t.detach().view(_WORD[t.element_size()])
    if t.device.type == "cpu" and t.nbytes <= WHOLE_BYTES:
        return zlib.crc32(cast(Any, words.contiguous().numpy()))
    for dim in range(1, t.ndim):
        if t.shape[dim] > POSITIONS:
            words = words.index_select(dim, _positions(t.shape[dim], t.device))
    return words.clone()


@functools.cache
def _positions(size: int, device: torch.device) -> Tensor:
    """POSITIONS indices below `size`, one in each equal part, not evenly apart."""
    part = size // POSITIONS
    return torch.tensor([i * part + (i * 7919) % part for i in range(POSITIONS)], device=device)
