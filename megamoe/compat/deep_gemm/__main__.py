"""Run a script that imports deep_gemm: python -m megamoe.compat.deep_gemm FILE [ARGUMENT...]"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megamoe.compat.deep_gemm import install

USAGE = "python -m megamoe.compat.deep_gemm FILE [ARGUMENT...]"


def main() -> None:
    """Put the script in our place: its folder first on sys.path, its arguments in sys.argv."""
    path = sys.argv[1] if len(sys.argv) > 1 else ""
    if path in ("-h", "--help"):
        print(f"{USAGE}\n\nRun a Python file in which `import deep_gemm` means megamoe.")
        return
    if not Path(path).is_file():
        print(f"give a Python file to run; got {path or 'nothing'}; {USAGE}", file=sys.stderr)
        sys.exit(2)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
