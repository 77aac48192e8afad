"""A small bar chart as SVG: exposed communication against ranks. Written by hand, no library."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from megamoe.errors import RangeError, require
from megamoe.simulator.prediction import Prediction

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 66, 20, 104, 56
_FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_MODES, _EXPOSED = ("#0072B2", "#7F8794", "#009E73"), "#CC79A7"


class Bar(NamedTuple):
    """One mode on one number of ranks."""

    mode: str
    num_ranks: int
    time_us: float
    exposed_us: float

    @staticmethod
    def of(prediction: Prediction) -> Bar:
        """The bar of a prediction."""
        how = prediction.schedule
        return Bar(how.mode, how.problem.num_ranks, prediction.time_us, prediction.exposed_us)


def exposed_plot(bars: Sequence[Bar], title: str, label: str = "simulated") -> str:
    """Time of the call over the number of ranks; the part that waits for the network on top.

    `label` says in the picture where the figures come from.
    """
    require(len(bars) > 0, "a plot needs at least one bar", got="none", kind=RangeError)
    top = _round_up(max(bar.time_us for bar in bars))
    high = HEIGHT - TOP - BOTTOM
    groups = list(dict.fromkeys(bar.num_ranks for bar in bars))
    modes = list(dict.fromkeys(bar.mode for bar in bars))
    wide = (WIDTH - LEFT - RIGHT) / len(groups)
    each = min(wide * 0.7 / len(modes), 66.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="{_FONT}" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(20, 28, "Exposed communication against ranks", "start", size=17, weight=600),
        _text(20, 48, title, "start", colour="#5b6676"),
        _text(WIDTH - RIGHT, 28, label, "end", colour=_EXPOSED, size=12, weight=600),
        *(_key(20 + 90 * i, 70, _MODES[i], mode) for i, mode in enumerate(modes)),
        _key(20 + 90 * len(modes), 70, _EXPOSED, "waiting for the network, mean over SMs"),
    ]
    for i in range(5):
        y = TOP + high * (1 - i / 4)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dde2e9"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, f"{top * i / 4:,.0f}", "end", colour="#5b6676"))
    for bar in bars:
        middle = LEFT + wide * (groups.index(bar.num_ranks) + 0.5)
        which = modes.index(bar.mode)
        x = middle + (which - (len(modes) - 1) / 2) * each
        parts += _bar(bar, x, each - 6, high / top, _MODES[which])
    for i, num_ranks in enumerate(groups):
        x = LEFT + wide * (i + 0.5)
        parts.append(_text(x, HEIGHT - BOTTOM + 18, str(num_ranks), "middle"))
    parts.append(_text(WIDTH / 2, HEIGHT - 14, "ranks", "middle", colour="#5b6676"))
    parts.append(_text(LEFT - 8, TOP - 14, "us", "end", colour="#5b6676"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(bar: Bar, x: float, width: float, scale: float, colour: str) -> list[str]:
    base = HEIGHT - BOTTOM
    busy, exposed = (bar.time_us - bar.exposed_us) * scale, bar.exposed_us * scale
    left = x - width / 2
    label = f"{bar.exposed_us / bar.time_us:.1%}" if bar.time_us else "0%"
    return [
        f'<rect x="{left:.1f}" y="{base - busy:.1f}" width="{width:.1f}" height="{busy:.1f}" '
        f'fill="{colour}"/>',
        f'<rect x="{left:.1f}" y="{base - busy - exposed:.1f}" width="{width:.1f}" '
        f'height="{exposed:.1f}" fill="{_EXPOSED}"/>',
        _text(x, base - busy - exposed - 6, label, "middle", size=12, weight=600),
    ]


def _key(x: float, y: float, colour: str, text: str) -> str:
    box = f'<rect x="{x}" y="{y - 9}" width="11" height="11" rx="2" fill="{colour}"/>'
    return box + _text(x + 16, y + 1, text, "start", colour="#5b6676", size=12)


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str,
    *,
    colour: str = "#1c2430",
    size: int = 13,
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}" font-weight="{weight}">{html.escape(text)}</text>'
    )


def _round_up(value: float) -> float:
    """The next value whose quarters are short numbers, for four ticks.

    >>> [_round_up(value) for value in (7.0, 31.0, 850.0)]
    [8.0, 32.0, 1000.0]
    """
    ten = 1.0
    while value > 10 * ten:
        ten *= 10
    return next(
        step * ten for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * ten >= value
    )
