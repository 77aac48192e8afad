"""Statistics: what a layer's experts received, recorded, as a value and as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megamoe.balance.files import read_json, write_json
from megamoe.balance.placement import Placement
from megamoe.errors import FileError, MegaMoEError, ShapeError, require

KIND, VERSION = "megamoe.stats", 1


@dataclass(frozen=True, slots=True)
class Statistics:
    """Rows since the layer was built, over all ranks."""

    hidden: int
    intermediate: int
    top_k: int
    recipe: str
    placement: Placement  # with which they were counted
    sent: tuple[tuple[int, ...], ...]  # [rank][logical expert]: rows that a rank's tokens asked for
    received: tuple[tuple[int, ...], ...]  # [rank][place]: rows that each physical expert computed

    def __post_init__(self) -> None:
        p = self.placement
        for name, rows, width in (
            ("sent", self.sent, p.num_experts),
            ("received", self.received, p.slots_per_rank),
        ):
            fits = len(rows) == p.num_ranks and all(len(row) == width for row in rows)
            require(
                fits and all(isinstance(c, int) and c >= 0 for row in rows for c in row),
                f"{name} must be {p.num_ranks} by {width} counts",
                got=f"{len(rows)} by {sorted({len(row) for row in rows})}",
                kind=ShapeError,
            )

    @property
    def logical(self) -> tuple[int, ...]:
        """Rows of each logical expert."""
        return tuple(map(sum, zip(*self.sent, strict=True)))

    def per_call(self, num_ranks: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Rows that each of `num_ranks` sends to each logical expert in one call like the average.

        num_tokens  of each rank in that call
        Per rank as recorded where the number of ranks is the same, else all ranks alike.
        """
        each = self.sent if len(self.sent) == num_ranks else (self.logical,) * num_ranks
        return tuple(_scaled(row, num_tokens * self.top_k) for row in each)

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        whole = {"kind": KIND, "version": VERSION, **asdict(self), "logical": self.logical}
        write_json(path, whole)

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Read what `save` wrote."""
        data = read_json(path, KIND, VERSION)
        try:
            return cls(
                data["hidden"],
                data["intermediate"],
                data["top_k"],
                data["recipe"],
                Placement.from_dict(data["placement"]),
                sent=tuple(map(tuple, data["sent"])),
                received=tuple(map(tuple, data["received"])),
            )
        except (KeyError, TypeError, MegaMoEError) as error:
            raise FileError(f"{path} must hold statistics; got {error!r}") from error


def _scaled(row: Sequence[int], total: int) -> tuple[int, ...]:
    """`row` scaled to `total` rows, largest remainders first; no rows stay no rows."""
    whole = sum(row)
    if whole == 0:
        return (0,) * len(row)
    parts = [divmod(num * total, whole) for num in row]
    spare = total - sum(floor for floor, _ in parts)
    first = sorted(range(len(row)), key=lambda e: (-parts[e][1], e))[:spare]
    got = [floor for floor, _ in parts]
    for expert in first:
        got[expert] += 1
    return tuple(got)
