"""Overrides: what a caller may fix, and how a given value meets the chosen one."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from megamoe.errors import DTypeError, RangeError, one_of, require
from megamoe.planner.choice import Choice, Value
from megamoe.studies.deep_gemm.choice import Picked

# fmt: off
OVERRIDES = {
    "mode":             "auto, fused, staged or split",
    "block_m":          "rows of tokens in a tile",
    "block_n":          "rows of weights in a tile",
    "block_k":          "depth of a stage",
    "num_stages":       "stages of the ring in shared memory",
    "wave_rule":        "divisor or tail",
    "experts_per_wave": "local experts that share a wave",
    "lag":              "row blocks by which L2 follows L1 within a wave; none: whole phases",
    "deal":             "static, ticket or largest_first",
    "reserve_sms":      "SMs left to other work",
    "max_tokens":       "tokens per rank that the workspace must hold",
    "ring_rows":        "rows of the pool that really exist",
    "combine":          "bf16 or fp8 rows on their way home",
    "k1_sms":           "split mode: SMs of dispatch and L1, the others run L2",
}
# fmt: on


class Picks:
    """Collects the choices of a plan; a given value beats the chosen one, after its check."""

    def __init__(self, given: Mapping[str, Value]) -> None:
        for name in given:
            near = get_close_matches(name, OVERRIDES, 1)
            require(
                name in OVERRIDES,
                f"an override must be one of {', '.join(OVERRIDES)}",
                got=name,
                fix=f"did you mean {near[0]}?" if near else "",
                kind=RangeError,
            )
        self._given = {name: value for name, value in given.items() if value is not None}
        self._choices: list[Choice] = []

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All choices so far, in order."""
        return tuple(self._choices)

    def given(self, name: str) -> bool:
        """Whether the caller fixed this one."""
        return name in self._given

    def note(self, name: str, value: Value, why: str) -> None:
        """Record a choice that cannot be overridden."""
        self._choices.append(Choice(name, value, why))

    def drop(self, name: str, value: Value) -> None:
        """Forget an override that has this value: it asks for the choice."""
        if self._given.get(name) == value:
            del self._given[name]

    def word(self, name: str, chosen: tuple[str, str], legal: tuple[str, ...]) -> str:
        """A name out of `legal`."""
        if not self.given(name):
            self.note(name, *chosen)
            return chosen[0]
        value = self._given[name]
        one_of(value, legal, name)
        self._note_given(name, value, chosen[0])
        return str(value)

    def number(
        self,
        name: str,
        chosen: Picked,
        *,
        legal: tuple[int, ...] | None = None,
        low: int = 0,
        high: int | None = None,
        fix: str = "",
    ) -> int:
        """An integer out of `legal`, or between `low` and `high`."""
        if not self.given(name):
            self.note(name, *chosen)
            return chosen.value
        value = self.integer(name)
        if legal is not None:
            words = ", ".join(map(str, legal))
            what, is_legal = f"{name} must be one of {words}", value in legal
        else:
            top = "" if high is None else f" and at most {high}"
            what = f"{name} must be at least {low}{top}"
            is_legal = low <= value and (high is None or value <= high)
        require(is_legal, what, got=value, fix=fix, kind=RangeError)
        self._note_given(name, value, chosen.value)
        return value

    def integer(self, name: str) -> int:
        """The given value, which must be an integer."""
        value = self._given[name]
        require(
            isinstance(value, int) and not isinstance(value, bool),
            f"{name} must be an integer",
            got=repr(value),
            kind=DTypeError,
        )
        assert isinstance(value, int)
        return value

    def _note_given(self, name: str, value: Value, instead_of: Value) -> None:
        also = "also the choice" if value == instead_of else f"instead of {instead_of}"
        self.note(name, value, f"given; {also}")
