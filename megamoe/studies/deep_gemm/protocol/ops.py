"""Steps: what a role may do to memory that others see. A role is a generator that yields them.

Whatever happens between two yields touches registers only, so a scheduler that picks the next role
before every step reaches every interleaving. A step is a tuple (code, cell, ...): plain integers,
because millions of them run.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from megamoe.errors import MegaMoEError

LOAD, STORE, ADD, OR, WAIT, ARRIVE, CALL = range(7)

U32 = 0xFFFFFFFF
U64 = 0xFFFFFFFFFFFFFFFF
HIGH = U32 << 32
TOP_BIT = 0x80000000

# What a wait is for, those nearest to a cause first; a timeout record holds the place in this list.
WAITS = (
    "counts",
    "row arrival",
    "mask",
    "ring slot",
    "rank barrier",
    "grid sync",
    "stage full",
    "stage empty",
    "SM sync",
    "kernel end",
)

Op = tuple[Any, ...]
Steps = Generator[Op, Any, None]
Finds = Generator[Op, Any, list[int]]  # steps that end with a list of numbers


class Violation(MegaMoEError):
    """The protocol broke one of its rules: the text says which, where, and who."""


def load(cell: int) -> Op:
    """A plain load. Legal only if what it sees was visible before the role's last acquire."""
    return (LOAD, cell)


def store(cell: int, value: object) -> Op:
    """A plain store: others may see it late, and in any order, until the role releases."""
    return (STORE, cell, value)


def add(cell: int, value: int, mask: int = U32, *, release: bool = True) -> Op:
    """Atomic add modulo the word's width; gives the old value. With release: see `Machine`."""
    return (ADD, cell, value, mask, release)


def set_bits(cell: int, bits: int, *, release: bool = True) -> Op:
    """Atomic or; gives the old value."""
    return (OR, cell, bits, U64, release)


def wait(
    cell: int,
    expected: int,
    what: str,
    tag: int = 0,
    *,
    mask: int = U64,
    acquire: bool = True,
    polls: bool = True,
) -> Op:
    """Wait until cell & mask == expected; gives the whole word.

    what, tag  for the report: one of WAITS, and which barrier, block or expert
    acquire    what was visible before this is safe to load afterwards
    polls      leaves when the rank's abort flag is set; every wait does
    """
    return (WAIT, cell, mask, expected, what, tag, acquire, polls)


def arrive(cell: int) -> Op:
    """Arrive on the mbarrier at `cell` (its phase) and `cell + 1` (arrivals left); releases."""
    return (ARRIVE, cell)


def call(function: object) -> Op:
    """One step of a host: run a function without arguments."""
    return (CALL, 0, function)
