"""For mkdocs: files outside docs/ that pages link to, such as examples, join the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(\)|#)")


def _inside(page: str, target: str) -> str | None:
    """The path in the repository of a link that leaves docs/; None where it stays inside."""
    whole = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if whole.startswith("docs/") else whole


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked to, under the path that it has in the repository."""
    for page in [f for f in files if f.src_uri.endswith(".md")]:
        text = Path(page.abs_src_path).read_text(encoding="utf-8")
        for _, target, _ in LINK.findall(text):
            path = _inside(page.src_uri, target)
            if path is None or files.get_file_from_path(path) is not None:
                continue
            if not (ROOT / path).is_file():
                raise PluginError(f"{page.src_uri} links to {target}, which is no file")
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point such links to the files of the site."""
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path = _inside(page.file.src_uri, match[2])
        target = match[2] if path is None else posixpath.relpath(path, here or ".")
        return f"{match[1]}{target}{match[3]}"

    return LINK.sub(moved, markdown)
