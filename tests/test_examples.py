"""Every example runs."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# These start processes, or change what the whole process sees.
ALONE = [path for path in EXAMPLES if path.stem in ("05_expert_parallel", "08_transformers")]


@pytest.mark.parametrize("path", sorted({*EXAMPLES} - {*ALONE}), ids=lambda p: p.stem)
def test_an_example_runs_and_says_something(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path)])
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        torch.set_default_device(None)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", ALONE, ids=lambda p: p.stem)
def test_an_example_runs_in_a_process_of_its_own(path):
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_are_examples():
    assert len(EXAMPLES) >= 8 and len(ALONE) == 2
