"""`megamoe bench headline`: the cells of README's table, as a record, a table and a picture.

A line is a model in the recipe that it is deployed in; a cell is a line at one number of tokens. A
record is measured in one run, or assembled by hand from other records: then each cell names its
file, commit and date. README's table and picture are made from a record and from nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megamoe.bench.cells import TOKENS, cells_named
from megamoe.bench.peers import Peers, gpu_of
from megamoe.bench.record import NOT_ITS_OWN, OK, RAISED, Report, no_record
from megamoe.errors import FileError, require
from megamoe.files import write_atomic
from megamoe.formats.spec import recipe_named

if TYPE_CHECKING:
    from megamoe.bench.layer import Settings

KIND, VERSION = "megamoe headline", 1
MEASURED, ASSEMBLED = "measured in one run", "assembled from records"
RIVALS = ("torch-bf16", "torch-fp8")  # timed beside ours; the others' times are recorded
FAMILIES = {  # how the name of a contestant begins -> (whose it is, bits of its weights)
    "dg-": ("DeepGEMM", 8),
    "tk-": ("triton_kernels", 4),
    "humming-": ("humming", 4),
    "torch-fp8": ("torch", 8),
    "torch-bf16": ("torch", 16),
}
LEVEL = 0.005  # of the peer's time: a ratio that rounds to 1.00 is neither faster nor slower


@dataclass(frozen=True, slots=True)
class Line:
    """A model in the recipe that it is deployed in on Hopper."""

    model: str
    recipe: str
    workload: str
    tokens: tuple[int, ...] = TOKENS


LINES = (
    Line("DeepSeek-V4-Flash", "w4a8_block", "flash-ep8"),
    Line("DeepSeek-V4-Pro", "w4a8_block", "pro-ep8"),
    Line("DeepSeek-V3", "w8a8", "v3-ep8"),
    Line("gpt-oss-120b", "w4a16", "gpt-oss-120b"),
)


@dataclass(frozen=True, slots=True)
class Timed:
    """One cell: our time and the fastest peer's, in microseconds; None is not measured."""

    model: str
    recipe: str
    cell: str
    num_tokens: int
    us: float | None = None
    spread: float | None = None  # largest distance between the medians of two rounds
    how: str = ""  # what ran: the backend, with its mode where it is known
    peer: str = ""
    peer_us: float | None = None
    peer_source: str = ""
    timed: dict[str, float] = field(default_factory=dict)  # others of the same run
    source: str = ""  # where it was measured: a file, and the commit and date of the run
    commit: str = ""
    date: str = ""

    @property
    def ratio(self) -> float | None:
        """Our time over the fastest peer's; below 1 we are faster."""
        return None if self.us is None or self.peer_us is None else self.us / self.peer_us

    @property
    def whose(self) -> str:
        """The library that the fastest peer belongs to."""
        return next((f for at, (f, _) in FAMILIES.items() if self.peer.startswith(at)), self.peer)


@dataclass(frozen=True, slots=True)
class Record:
    """All cells of the headline, with what is needed to believe or repeat them."""

    how: str  # MEASURED or ASSEMBLED
    provenance: str
    method: str
    cells: tuple[Timed, ...]
    exit_code: int = 0
    about_peers: str = ""  # where the others' times are from, or why none were compared

    def to_json(self) -> str:
        whole = {"kind": KIND, "version": VERSION, **asdict(self)}
        return json.dumps(whole, indent=1) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """The record that `megamoe bench headline --out` wrote."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            cells = tuple(Timed(**cell) for cell in data.pop("cells"))
            kind = data.pop("kind"), data.pop("version")
            record = cls(cells=cells, **data)
        except NOT_ITS_OWN as error:
            raise no_record(error, path, "megamoe bench headline") from error
        require(
            kind == (KIND, VERSION),
            f"the record must be a {KIND} of version {VERSION}",
            got=f"{kind[0]} of version {kind[1]}",
            kind=FileError,
        )
        return record

    def of_line(self, line: Line) -> list[Timed]:
        """The cells of one line, by tokens; those that the record lacks are not measured."""
        by_cell = {(c.recipe, c.cell): c for c in self.cells}
        names = [(n, f"{line.workload}/{n}") for n in line.tokens]
        return [
            by_cell.get((line.recipe, name), Timed(line.model, line.recipe, name, n))
            for n, name in names
        ]

    def markdown(self) -> str:
        """README's table, the words below it and where each figure was made."""
        head = [
            "| model, recipe | " + " | ".join(f"{n:,} tokens" for n in TOKENS) + " |",
            "| --- |" + " ---: |" * len(TOKENS),
        ]
        rows = [
            f"| {line.model}, `{line.recipe}` | "
            + " | ".join(text_of(cell) for cell in self.of_line(line))
            + " |"
            for line in LINES
        ]
        return "\n".join([*head, *rows, "", *self._words(), ""])

    def _words(self) -> list[str]:
        spreads = [c.spread for c in self.cells if c.spread is not None]
        sources: dict[str, list[str]] = {}
        for c in self.cells:
            if c.us is not None:
                where = f"`{c.source}` at {c.commit}, {c.date}" if c.source else ""
                sources.setdefault(where, []).append(c.cell)
        lines = [*(f"- {line}" for line in self.summary()), ""]
        lines += ["<details><summary>Where and how these were measured</summary>", ""]
        lines.append(f"- Ours {self.how}: {self.provenance}.")
        lines.append(f"- {self.method[0].upper()}{self.method[1:]}.")
        if spreads:
            most = max(self.cells, key=lambda cell: cell.spread or 0.0)
            lines.append(
                f"- The same cell, timed in two rounds of this run, differs by up to "
                f"{100 * max(spreads):.1f}% ({most.model}, {most.num_tokens:,} tokens); half of "
                f"the cells by less than {100 * median(spreads):.1f}%."
            )
        if self.about_peers:
            lines.append(f"- {self.about_peers}.")
        for where, cells in sources.items():
            if where:
                lines.append(f"- {where}: {', '.join(cells)}.")
        return [*lines, "", "</details>"]

    def summary(self) -> list[str]:
        """One sentence a recipe with a peer: its ratios in decode, in between and in prefill."""
        lines = []
        for recipe in dict.fromkeys(line.recipe for line in LINES):
            cells = [c for line in LINES if line.recipe == recipe for c in self.of_line(line)]
            if all(c.ratio is None for c in cells):
                continue
            parts = []
            for what, counts in (("decode", (8, 64)), ("512 tokens", (512,)),
                                 ("prefill", (2048, 8192))):  # fmt: skip
                ratios = [c.ratio for c in cells if c.num_tokens in counts and c.ratio is not None]
                ran = any(c.us is not None for c in cells if c.num_tokens in counts)
                parts.append(f"{what} {_span(ratios) if ratios else _without(ran)}")
            lines.append(f"`{recipe}`, our time over the fastest peer's: {'; '.join(parts)}.")
        return lines

    def cells_table(self) -> str:
        """The table of docs/hopper.md: a row a cell, with its spread and torch's own times."""
        rows = [
            "| model, recipe | tokens | us | rounds differ by | fastest peer | its us | ratio "
            "| torch FP8 us | torch BF16 us |",
            "| --- |" + " ---: |" * 3 + " --- |" + " ---: |" * 4,
        ]
        for c in self.cells:
            spread = "" if c.spread is None else f"{100 * c.spread:.1f}%"
            peer = f"{c.peer_us:,.1f}" if c.peer_us is not None else ""
            others = (c.timed.get(name) for name in ("torch-fp8", "torch-bf16"))
            rows.append(
                f"| {c.model}, `{c.recipe}` | {c.num_tokens:,} "
                f"| {'not measured' if c.us is None else f'{c.us:,.1f}'} | {spread} "
                f"| {c.peer or 'none measured'} | {peer} "
                f"| {'' if c.ratio is None else f'{c.ratio:.2f}'} | "
                + " | ".join("" if us is None else f"{us:,.0f}" for us in others)
                + " |"
            )
        return "\n".join([*rows, ""])


def _span(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def _without(ran: bool) -> str:
    return "no peer measured" if ran else "not measured"


def text_of(cell: Timed) -> str:
    """A cell of the table.

    >>> text_of(Timed("", "", "", 8, 94.2, peer="humming-a8", peer_us=145.9))
    '94 vs 146 humming: 0.65'
    >>> text_of(Timed("", "", "", 8, 784.3, peer="dg-masked", peer_us=669.3))
    '784 vs 669 DeepGEMM: **1.17, slower**'
    """
    if cell.us is None:
        return "not measured"
    if cell.ratio is None or cell.peer_us is None:
        return f"{cell.us:,.0f}, no peer measured"
    ratio = f"**{cell.ratio:.2f}, slower**" if cell.ratio >= 1 + LEVEL else f"{cell.ratio:.2f}"
    return f"{cell.us:,.0f} vs {cell.peer_us:,.0f} {cell.whose}: {ratio}"


def measure(
    settings: Settings,
    peers: Peers | None,
    *,
    lines: Sequence[Line] = LINES,
    progress: Callable[[str, int, int], None] = lambda step, done, of: None,
    on_cell: Callable[[Record], None] = lambda so_far: None,
) -> Record:
    """Check and time every cell on the device of `settings`; calls are shuffled one by one.

    Recorded peers of another GPU are left out, and the record says so.
    """
    import torch

    from megamoe.bench.layer import measure as layers
    from megamoe.bench.provenance import provenance

    peers, about = comparable(peers, gpu_of(provenance(torch.device(settings.device))))
    names = {line: [f"{line.workload}/{n}" for n in line.tokens] for line in lines}
    num_cells = sum(map(len, names.values()))
    before = Record(MEASURED, "", "", (), about_peers=about)
    for line in lines:
        one = replace(settings, backends=("auto", *RIVALS), recipes=(line.recipe,))

        def keep(so_far: Report, line: Line = line, before: Record = before) -> None:
            record = _with_line(before, line, so_far, peers)
            progress("cells", len(record.cells), num_cells)
            on_cell(record)

        report = layers(cells_named(names[line]), one, peers=peers, on_cell=keep)
        before = _with_line(before, line, report, peers)
    return before


def _with_line(before: Record, line: Line, report: Report, peers: Peers | None) -> Record:
    """The record with the cells of a line that a report has."""
    cells = []
    for cell in dict.fromkeys(row.cell for row in report.rows):
        rows = tuple(row for row in report.rows if row.cell == cell)
        cells.append(cell_of(line, replace(report, rows=rows), peers))
    return Record(
        MEASURED, report.provenance, report.method, (*before.cells, *cells),
        _worse(before.exit_code, report.exit_code), before.about_peers,
    )  # fmt: skip


def comparable(peers: Peers | None, gpu: str) -> tuple[Peers | None, str]:
    """The recorded peers that times of this GPU are compared with, and what is said of them."""
    if peers is None:
        return None, "No recorded peers were compared: the fastest peer is torch's"
    if peers.gpu and peers.gpu != gpu:
        return None, (
            f"The recorded peers are of {peers.gpu} and were not compared with {gpu}: the fastest "
            "peer is torch's"
        )
    return peers, (
        "The peers' times were recorded in other processes "
        f"({peers.provenance or 'the file does not say where'}), torch's in the same run as ours. "
        "So treat ratios between 0.85 and 1.15 as undecided"
    )


def _worse(one: int, other: int) -> int:
    """A wrong result before one that raised before nothing that ran."""
    return next((code for code in (1, RAISED, 3) if code in (one, other)), 0)


def serves(contestant: str, recipe: str) -> bool:
    """Whether its weights have at least as many bits as the recipe's: fewer are another model.

    >>> serves("dg-masked", "w4a8_block"), serves("humming-a8-tuned", "w8a8")
    (True, False)
    """
    bits = recipe_named(recipe).weights.element.bits
    return all(own >= bits for at, (_, own) in FAMILIES.items() if contestant.startswith(at))


def cell_of(line: Line, report: Report, peers: Peers | None) -> Timed:
    """One cell out of the report of its run: our row, and the fastest other, timed or recorded.

    Only others that serve the line's checkpoint: FP4 weights do not serve one of FP8.
    """
    ours = next((r for r in report.rows if r.ours), None)
    cell = report.rows[0].cell
    timed = {r.contestant: r.us for r in report.rows if not r.ours and r.status == OK and r.us}
    others = {name: (us, "") for name, us in timed.items()}
    if peers is not None:
        others |= {name: (us, "recorded") for name, us in peers.cells.get(cell, {}).items()}
    others = {name: timing for name, timing in others.items() if serves(name, line.recipe)}
    peer = min(others, key=lambda name: others[name][0]) if others else ""
    is_timed = ours is not None and ours.status == OK
    return Timed(
        model=line.model,
        recipe=line.recipe,
        cell=cell,
        num_tokens=int(cell.rpartition("/")[2]),
        us=ours.us if ours is not None and is_timed else None,
        spread=ours.spread if ours is not None else None,
        how=ours.contestant if ours is not None else "",
        peer=peer,
        peer_us=others[peer][0] if peer else None,
        peer_source=others[peer][1] if peer else "",
        timed=timed,
    )


def write(record: Record, folder: Path, name: str = "headline") -> list[Path]:
    """Write `name`.json into `folder`."""
    path = folder / f"{name}.json"
    write_atomic(path, record.to_json())
    return [path]


FASTER, SLOWER, PLAIN = "#2f7fc1", "#d9822b", "#9aa5b1"


def draw(record: Record, path: Path) -> Path:
    """A panel per line; a bar is our time over the fastest peer's, with both in microseconds."""
    from megamoe.bench.plots import pyplot_or_refuse, save

    figure = pyplot_or_refuse().figure(figsize=(11.0, 7.2), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flatten()
    for axes, line in zip(panels, LINES, strict=True):
        _panel(axes, line, record.of_line(line))
    for axes in panels[2:]:
        axes.set_xlabel("our time / fastest peer's   (left of the line: megamoe is faster)")
    figure.suptitle(
        f"One MoE layer call on one {gpu_of(record.provenance)}, measured: megamoe against the "
        "fastest peer",
        fontsize=13, fontweight="bold",
    )  # fmt: skip
    peers = "; peers recorded before" if any(c.peer_source for c in record.cells) else ""
    where = f"{record.how}{peers}: {record.provenance}"
    figure.supxlabel(where, fontsize=7, color="gray", wrap=True)
    return save(figure, path)


def _panel(axes: Any, line: Line, cells: Sequence[Timed]) -> None:
    axes.set_title(f"{line.model}, {line.recipe}", loc="left", fontsize=11)
    axes.axvline(1.0, color="black", linewidth=1.2, zorder=3)
    axes.set_xlim(0.0, 1.95)
    axes.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0, 1.25])
    axes.set_ylim(-0.6, len(cells) - 0.4)
    axes.set_yticks(range(len(cells)), [f"{c.num_tokens:,} tokens" for c in cells])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for at, cell in enumerate(cells):
        if cell.ratio is None or cell.us is None or cell.peer_us is None:
            text = "not measured" if cell.us is None else f"{cell.us:,.0f} us; no peer measured"
            axes.text(0.03, at, text, va="center", fontsize=9, color="#5c6670", style="italic")
            continue
        color = FASTER if cell.ratio < 1 - LEVEL else SLOWER if cell.ratio >= 1 + LEVEL else PLAIN
        axes.barh(at, cell.ratio, height=0.66, color=color)
        axes.text(
            0.03, at, f"{cell.ratio:.2f}", va="center", fontsize=9.5, color="white",
            fontweight="bold",
        )  # fmt: skip
        text = f"{cell.us:,.0f} us; {cell.whose} {cell.peer_us:,.0f} us"
        axes.text(max(cell.ratio, 1.0) + 0.03, at, text, va="center", fontsize=8.5)
