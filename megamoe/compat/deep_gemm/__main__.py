"""Run a script that imports deep_gemm: python -m megamoe.compat.deep_gemm FILE [ARGUMENT...]"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megamoe.compat.deep_gemm import install
from megamoe.errors import FileError, require


def main() -> None:
    """Put the script in our place: its folder first on sys.path, its arguments in sys.argv."""
    require(
        len(sys.argv) > 1 and Path(sys.argv[1]).is_file(),
        "give a Python file to run",
        got=sys.argv[1:2] or "nothing",
        kind=FileError,
    )
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
