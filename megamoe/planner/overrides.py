"""Overrides: what a caller may fix of a plan. Checked by name and type; tables check the rest."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from megamoe.errors import DTypeError, NotAvailable, RangeError, one_of, require
from megamoe.planner.choice import Value

# fmt: off
# name -> (type, meaning). Tile overrides hold for L1 and L2 of the routed experts.
OVERRIDES: dict[str, tuple[type, str]] = {
    "backend":      (str, "auto, hopper, blackwell, portable or reference"),
    "mode":         (str, "auto, staged, fused, split or, over ranks, chain"),
    "reserve_sms":  (int, "SMs that fused launches leave to others"),
    "pool_rows":    (int, "fused, chain, split: rows of the pool; more run in waves, passes"),
    "overlap_launches": (bool, "staged: each launch is placed while the one before it ends"),
    "kernel":       (str, "hopper: swap_ab (weights are the MMA's M) or gemm (tokens are)"),
    "block_m":      (int, "tokens of a tile"),
    "block_n":      (int, "weight rows of a tile"),
    "block_k":      (int, "columns of K in a stage"),
    "num_stages":   (int, "stages of the ring in shared memory"),
    "group_m":      (int, "token tiles that share each tile of weights"),
    "schedule":     (str, "strided, dynamic; hopper gemm: static too; blackwell: sorted too"),
    "decode_ahead": (int, "hopper gemm, FP4: K blocks of each ring that weights are decoded into"),
    "cta_pair":     (bool, "blackwell: two CTAs share each product (Triton 3.8 and newer)"),
    "num_warps":    (int, "portable: warps of a program"),
    "l1_sms":       (int, "split: SMs of dispatch and L1, a multiple of 8; L2 has the rest"),
}
# fmt: on
ROUTES = (
    "backend",
    "mode",
    "reserve_sms",
    "pool_rows",
    "overlap_launches",
)  # arguments of MoE by their own names
CHOICES = tuple(name for name in OVERRIDES if name not in ROUTES)  # `overrides=` takes these
TILE = tuple(name for name in CHOICES if name != "l1_sms")

Overrides = tuple[tuple[str, Value], ...]


def checked(overrides: Mapping[str, Value], *, legal: tuple[str, ...] | None = None) -> Overrides:
    """Overrides as a sorted, hashable value; one of None is not given."""
    require(
        isinstance(overrides, Mapping),
        "overrides must map names to values",
        got=repr(overrides),
        fix='such as {"block_m": 64}',
        kind=DTypeError,
    )
    names = tuple(OVERRIDES) if legal is None else legal
    for name, value in overrides.items():
        near = get_close_matches(name, names, 1)
        fix = f"did you mean {near[0]}?" if near else ""
        if name in ROUTES and legal is not None:
            fix = f"pass {name}= as an argument of its own"
        require(
            name in names,
            f"an override must be one of {', '.join(names)}",
            got=name,
            fix=fix,
            kind=RangeError,
        )
        if value is None:
            continue
        kind, meaning = OVERRIDES[name]
        word = {int: "an integer", str: "a word", bool: "True or False"}[kind]
        require(
            type(value) is kind,
            f"{name} ({meaning}) must be {word}",
            got=repr(value),
            kind=DTypeError,
        )
        if kind is int:
            require(
                isinstance(value, int) and value >= (name != "reserve_sms"),
                f"{name} must {'not be negative' if name == 'reserve_sms' else 'be positive'}",
                got=value,
                kind=RangeError,
            )
    return tuple(sorted((n, v) for n, v in overrides.items() if v is not None))


POWERS = {"block_m": (8, 256), "block_n": (16, 512), "block_k": (16, 1024), "num_warps": (1, 32)}
WORDS = {"kernel": ("swap_ab", "gemm"), "schedule": ("strided", "static", "dynamic", "sorted")}


def check_values(overrides: Overrides) -> None:
    """Refuse what no backend takes; the tables of Hopper and Blackwell say more of their own."""
    for name, value in overrides:
        if name in POWERS and isinstance(value, int):
            low, high = POWERS[name]
            require(
                low <= value <= high and value & (value - 1) == 0,
                f"{name} must be a power of two from {low} to {high}",
                got=value,
                kind=RangeError,
            )
        elif name in WORDS:
            one_of(value, WORDS[name], name)


def check_pairs(backend: str, overrides: Overrides) -> None:
    """Refuse pairs of CTAs unless Blackwell's backend is asked for by name, as `backend` is.

    `auto` may come to it by a certificate, which is not of pairs: `megamoe certify` runs none.
    """
    require(
        backend == "blackwell" or not dict(overrides).get("cta_pair"),
        "cta_pair must be asked for with backend='blackwell': other backends have no pairs, and no "
        "certificate is of them",
        got=f"backend {backend}",
        fix="name the backend, or leave out cta_pair",
        kind=NotAvailable,
    )


def word(overrides: Mapping[str, Value], name: str, legal: tuple[str, ...]) -> str | None:
    """A given word out of `legal`, or None."""
    value = overrides.get(name)
    if value is None:
        return None
    one_of(value, legal, name)
    return str(value)
