"""The calls that compute-sanitizer runs on a GPU also run in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.support import INTERPRETED

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(INTERPRETED, reason="starts an interpreter of its own")
def test_the_sanitizers_calls_run():
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    parts = ["w4a16", "quantisers", "graphs"]
    command = [sys.executable, "-W", "ignore", "scripts/sanitize_calls.py", *parts]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"done {part}" for part in parts]
