"""A failing interleaving as a page: a column for each role and operation, time runs downwards."""

import html
import itertools

# Steps by what they begin with: their colour. The others are loads, stores and launches.
COLOURS = {
    "wait": "#D9DCE1", "copy": "#7FB8DA", "product": "#0072B2", "arrive": "#E69F00",
    "atomic": "#E69F00", "signal": "#D55E00", "completes": "#009E73", "give up": "#CC79A7",
    "report": "#CC79A7",
}  # fmt: skip
_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font:13px system-ui,sans-serif;margin:16px}}pre{{white-space:pre-wrap}}
table{{border-collapse:collapse}}th{{position:sticky;top:0;background:#fff;max-width:9em;
text-align:left;vertical-align:bottom;padding:2px 6px;border-bottom:1px solid #888}}
td{{padding:1px 6px;border-left:1px solid #eee;vertical-align:top}}
td.n{{color:#888;text-align:right}}.s{{border-radius:3px;padding:0 4px}}</style>
<h1>{title}</h1><pre>{story}</pre><p>{legend}</p><table><tr><th>step</th>{heads}</tr>
{rows}</table>"""


def _colour(what):
    return next((c for name, c in COLOURS.items() if what.startswith(name)), "#fff")


def _cell(steps):
    return " ".join(
        f'<span class=s style="background:{_colour(what)}">{html.escape(what)}'
        + (f" &times;{num}" if num > 1 else "")
        + "</span>"
        for what, num in ((what, len(list(same))) for what, same in itertools.groupby(steps))
    )


def page(title, story, log):
    """One page that needs nothing else; `log` [(role or operation, step)] of the run."""
    lines = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in log))}
    rows, at = [], 0
    for name, steps in itertools.groupby(log, key=lambda entry: entry[0]):
        did = [what for _, what in steps]
        cell = f"<td>{_cell(did)}</td>" + "<td></td>" * (len(lines) - lines[name] - 1)
        rows.append(f"<tr><td class=n>{at}</td>" + "<td></td>" * lines[name] + cell + "</tr>")
        at += len(did)
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in lines)
    legend = " ".join(
        f'<span class=s style="background:{c}">{n}</span>' for n, c in COLOURS.items()
    )
    return _PAGE.format(
        title=html.escape(title), story=html.escape(story), legend=legend, heads=heads,
        rows="\n".join(rows),
    )  # fmt: skip
