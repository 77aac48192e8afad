"""Processes that share one run of tests (`scripts/gpu/claim.py`) make each test once."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = "import pytest\n@pytest.mark.parametrize('i', range(20))\ndef test_it(i): assert i != 7\n"


def test_each_test_is_made_by_one_process(tmp_path):
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_bits.py").write_text("def test_of_minutes(): pass\n")
    claims = tmp_path / "claims"
    claims.mkdir()
    path = f"{ROOT}{os.pathsep}{ROOT / 'scripts' / 'gpu'}"
    env = os.environ | {"CLAIMS": str(claims), "PYTHONPATH": path}
    run = [sys.executable, "-m", "pytest", "-p", "claim", "-p", "no:cacheprovider", "-vv", "-rA",
           "--rootdir", str(tmp_path), "-c", os.devnull, "test_a.py", "test_bits.py"]  # fmt: skip
    both = [subprocess.Popen(run, cwd=tmp_path, env=env, stdout=-1, text=True) for _ in range(2)]
    said = "".join(process.communicate(timeout=120)[0] for process in both)
    outcomes = re.findall(r"^(PASSED|FAILED) (\S+)", said, re.MULTILINE)
    assert len(outcomes) == len(set(outcomes)) == 21
    assert [name for how, name in outcomes if how == "FAILED"] == ["test_a.py::test_it[7]"]
    assert sorted(process.returncode for process in both) in ([0, 1], [1, 5])
