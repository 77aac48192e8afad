"""The error types, and `require`: the one way this library refuses input."""

from __future__ import annotations


class MegaMoEError(Exception):
    """Base of every error raised on purpose: what is required, what came, what to do."""


class ShapeError(MegaMoEError, ValueError):
    """A size, rank or stride does not fit."""


class DTypeError(MegaMoEError, TypeError):
    """A tensor or argument has the wrong type."""


class DeviceError(MegaMoEError, ValueError):
    """Tensors that must lie on one device do not."""


class RangeError(MegaMoEError, ValueError):
    """A value lies outside what is legal: an expert id, a NaN weight, an unknown name."""


class FileError(MegaMoEError, OSError):
    """A file is missing, truncated, or not one of ours."""


class CapacityError(MegaMoEError, RuntimeError):
    """More tokens than the layer was built for. Tokens are never dropped."""


class NotAvailable(MegaMoEError, RuntimeError):
    """This build, machine or GPU cannot do it; the text names what can."""


class RankError(MegaMoEError, ConnectionError):
    """The ranks of a group do not fit together, or one of them left."""


class MegaMoETimeout(MegaMoEError, TimeoutError):
    """A wait ran past its bound. Nobody trapped: every role drained, and a reset makes it usable.

    rank      whose wait it was
    barrier   what it waited for: a barrier with its tag, or a word of the workspace
    expected  the value that did not come
    seen      the value that stood there
    """

    def __init__(
        self,
        rank: int,
        barrier: str,
        expected: int,
        seen: int,
        fix: str = "reset the world before the next call",
    ) -> None:
        self.rank, self.barrier, self.expected, self.seen = rank, barrier, expected, seen
        super().__init__(
            f"rank {rank} waited too long for {barrier}: expected {expected:#x}; got {seen:#x}; "
            f"{fix}"
        )


def require(
    ok: bool, what: str, *, got: object, fix: str = "", kind: type[MegaMoEError] = MegaMoEError
) -> None:
    """Raise `kind` as 'what; got X; fix' unless `ok`."""
    if not ok:
        raise kind("; ".join(part for part in (what, f"got {got}", fix) if part))


def one_of(value: object, legal: tuple[str, ...], what: str) -> None:
    """Require that `value` is one of the names in `legal`."""
    if value in legal:  # asked several times in a call: no text is made
        return
    require(
        False,
        f"{what} must be one of {', '.join(legal)}",
        got=repr(value),
        kind=RangeError,
    )
