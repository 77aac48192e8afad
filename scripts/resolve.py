"""Whether pip finds megamoe, each torch of the tested table and its Triton together.

`python scripts/resolve.py [WHEEL or folder] [TORCH...]`: nothing is installed. Where the registry
serves metadata apart from wheels, as pypi.org does, a row takes seconds; elsewhere pip downloads
1.7 GB for each, so that CI alone runs this.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megamoe.tested import TRITON_OF_TORCH, minor  # noqa: E402


def resolved(what: str, torch: str) -> dict[str, str]:
    """By name, the versions that pip would install; empty where it finds none."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
               "--report", "-", what, f"torch=={torch}.*"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        print(done.stderr.strip()[-400:])
        return {}
    parts = [one["metadata"] for one in json.loads(done.stdout)["install"]]
    return {part["name"].lower(): part["version"] for part in parts}


def main(what: str, wanted: list[str]) -> int:
    """1 if a row of the table is not what pip finds."""
    wrong = 0
    for torch in wanted or TRITON_OF_TORCH:
        fits = float(TRITON_OF_TORCH[torch]) >= 3.6  # below it nothing must be found
        versions = resolved(what, torch)
        triton = minor(versions.get("triton", "0.0"))
        ok = triton == TRITON_OF_TORCH[torch] if fits else not versions
        print(f"torch {torch}: triton {triton if versions else 'none'}: {'ok' if ok else 'WRONG'}")
        wrong |= not ok
    return wrong


if __name__ == "__main__":
    first, *rest = sys.argv[1:] or ["."]
    sys.exit(main(first, rest))
