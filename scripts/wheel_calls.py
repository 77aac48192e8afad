"""How released packages call DeepGEMM's MegaMoE, read from their wheels as text; none is imported.

    python scripts/wheel_calls.py > tests/data/deep_gemm_calls.json           # from PyPI
    python scripts/wheel_calls.py WHEELS > tests/data/deep_gemm_calls.json    # a folder of them

Writes the parameters of the fork's own functions, and for every call of one of them in the other
wheels how many arguments stand by position and which by name; and how vLLM calls the methods of its
experts, which the plugin's stand in for. `tests/compat/test_callers.py` and
`tests/integrations/test_vllm.py` bind all of them to our signatures. From PyPI only those parts of
a wheel travel that are read.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin

RELEASES = {
    "sgl-deep-gemm": "0.2.5", "vllm": "0.33.0", "sglang": "0.5.23",
    "flashinfer-python": "0.7.2.post1", "transformers": "5.23.0",
}  # fmt: skip
PLATFORM = tuple(f"{tag}.whl" for tag in ("py3-none-any", "manylinux_2_28_x86_64",
                 "manylinux2014_x86_64", "cp312-manylinux_2_34_x86_64"))  # fmt: skip
CHUNK = 4 << 20
TIMEOUT_S = 60

UPSTREAM = "sgl_deep_gemm"
FILES = ("mega/__init__", "utils/math", "utils/layout", "utils/dist", "testing/bench",
         "testing/numeric", "testing/utils")  # fmt: skip
# Names that other branches have, and settings that are bound without a def.
MORE = ("NVFP4SymmBuffer", "fp8_mega_moe", "get_block_m_for_nvfp4_mega_moe", "get_num_sms",
        "get_symm_buffer_for_sm90_mega_moe", "set_num_sms", "transform_sf_into_required_layout",
        "transform_weights_for_mega_moe_sm90")  # fmt: skip
MODULES = ("deep_gemm", "deepgemm", "_deep_gemm", "dg")  # what callers call the module


# Where vLLM calls its experts' methods, and under which names it has them.
EXPERTS = ("vllm/model_executor/layers/fused_moe/routed_experts.py",
           "vllm/model_executor/layers/fused_moe/fused_moe_method_base.py",
           "vllm/model_executor/layers/fused_moe/runner/moe_runner.py",
           "vllm/model_executor/model_loader/utils.py")  # fmt: skip
OWNERS = {"quant_method": "method", "_quant_method": "method", "moe_kernel": "kernel"}


class Wheel(NamedTuple):
    """A wheel's file name, and its bytes, which are read as they are asked for."""

    name: str
    file: str | io.RawIOBase

    @property
    def release(self) -> str:
        return "-".join(self.name.split("-")[:2])


class Remote(io.RawIOBase):
    """A file behind a URL, read in chunks that are kept."""

    def __init__(self, url: str) -> None:
        self.url, self.at = url, 0
        self.chunks: dict[int, bytes] = {}
        self.size = CHUNK
        self._chunk(0)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        end = self.size if size < 0 else min(self.at + size, self.size)
        parts = []
        while self.at < end:
            number, first = divmod(self.at, CHUNK)
            part = self._chunk(number)[first : first + end - self.at]
            parts.append(part)
            self.at += len(part)
        return b"".join(parts)

    def _chunk(self, number: int) -> bytes:
        if number not in self.chunks:
            last = min((number + 1) * CHUNK, self.size) - 1
            wanted = {"Range": f"bytes={number * CHUNK}-{last}"}
            request = urllib.request.Request(self.url, headers=wanted)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                self.chunks[number] = answer.read()
                self.size = int(answer.headers["Content-Range"].rpartition("/")[2])
        return self.chunks[number]


def index_url() -> str:
    """The package index that pip asks."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    answer = subprocess.run(asked, capture_output=True, text=True)
    if answer.returncode == 0 and answer.stdout.strip():
        return answer.stdout.strip()
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url)


def released() -> list[Wheel]:
    """The wheels of RELEASES; raises OSError where there is no way to pip's index."""
    found, index = [], index_url().rstrip("/")
    for name, version in RELEASES.items():
        with urllib.request.urlopen(f"{index}/{name}/", timeout=TIMEOUT_S) as page:
            links = re.findall(r'href="([^"#]+\.whl)', page.read().decode())
        head = f"{name.replace('-', '_')}-{version}-"
        files = {link.rpartition("/")[2]: urljoin(page.url, link) for link in links}
        one = next(f for f in files if f.startswith(head) and f.endswith(PLATFORM))
        found.append(Wheel(one, Remote(files[one])))
    return sorted(found)


def sources(wheel: Wheel) -> Iterator[tuple[str, bytes]]:
    """Path and text of every Python file of a wheel."""
    with zipfile.ZipFile(wheel.file) as files:  # type: ignore[arg-type]
        for name in sorted(files.namelist()):
            if name.endswith(".py"):
                yield name, files.read(name)


def signatures(wheel: Wheel) -> dict[str, list[str]]:
    """ "utils/math.align": parameter names, of the functions that callers may use."""
    found = {}
    with zipfile.ZipFile(wheel.file) as files:  # type: ignore[arg-type]
        for file in FILES:
            for node in ast.walk(ast.parse(files.read(f"deep_gemm/{file}.py"))):
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    if node.args.args[:1] and node.args.args[0].arg == "self":
                        continue
                    if node.name in ("decorator", "wrapper"):
                        continue
                    found[f"{file}.{node.name}"] = [a.arg for a in node.args.args]
                if isinstance(node, ast.ClassDef) and node.name == "SymmBuffer":
                    made = next(f for f in node.body if getattr(f, "name", "") == "__init__")
                    assert isinstance(made, ast.FunctionDef)
                    found[f"{file}.SymmBuffer"] = [a.arg for a in made.args.args[1:]]
    return dict(sorted(found.items()))


def calls(tree: ast.Module, names: set[str]) -> Iterator[dict[str, object]]:
    """Calls of `deep_gemm.name(...)`, or of a name that was imported from it."""
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deep_gemm"
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        func, name = node.func, None
        if isinstance(func, ast.Attribute):
            owner = func.value
            last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            name = func.attr if last in MODULES else None
        elif isinstance(func, ast.Name):
            name = imported.get(func.id)
        if name in names:
            yield {"name": name, "line": node.lineno, **arguments(node)}


def arguments(node: ast.Call) -> dict[str, object]:
    """How many stand by position, and which by name."""
    return {
        "by_position": sum(not isinstance(a, ast.Starred) for a in node.args),
        "by_name": [k.arg for k in node.keywords if k.arg],
        "has_more": any(isinstance(a, ast.Starred) for a in node.args)
        or any(k.arg is None for k in node.keywords),
    }


def asked(tree: ast.Module) -> Iterator[dict[str, object]]:
    """What vLLM reads and calls of a method of experts and of its kernel."""
    called = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)):
            continue
        owner = node.value
        last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if last in OWNERS and not node.attr.startswith("__"):
            call = called.get(node)
            row = {"of": OWNERS[last], "name": node.attr, "line": node.lineno}
            yield row if call is None else row | arguments(call)


def main() -> None:
    if len(sys.argv) > 1:
        wheels = [Wheel(w.name, str(w)) for w in sorted(Path(sys.argv[1]).glob("*.whl"))]
    else:
        wheels = released()
    own = next(w for w in wheels if w.name.startswith(UPSTREAM))
    upstream = signatures(own)
    names = {name.split(".")[-1] for name in upstream} | set(MORE)
    rows, methods = [], []
    for wheel in wheels:
        for file, text in sources(wheel) if wheel != own else ():
            where = {"wheel": wheel.release, "file": file}
            if b"deep_gemm" in text or b"deepgemm" in text:
                rows += [where | call for call in calls(ast.parse(text), names)]
            if file in EXPERTS:
                methods += [where | row for row in asked(ast.parse(text))]
    table = {"upstream": own.release, "signatures": upstream, "calls": rows, "methods": methods}
    print(json.dumps(table, indent=None, separators=(",", ":")).replace('{"wheel"', '\n{"wheel"'))


if __name__ == "__main__":
    main()
