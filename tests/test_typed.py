"""A user's type checker finds py.typed and sees the library's types."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USER = """
import megamoe as mm

plan = mm.plan(mm.Problem(8, 4096, 2048, 32, 6), "h200", block_m=32)
reveal_type(plan)
reveal_type(plan.mode)
reveal_type(plan.launches[0].grid)


def build(weights: mm.ExpertWeights) -> mm.Plan:
    layer = mm.MoE(weights, num_experts=32, top_k=6)
    reveal_type(layer.plan(8))
    return layer.plan(8)


print(plan.no_such_attribute)
mm.Problem(8, 4096, 2048, 32, "six")
mm.MoE()
"""
CONFIG = "[mypy]\nstrict = true\nignore_missing_imports = true\nwarn_unused_configs = false\n"


def test_a_consumer_is_type_checked(tmp_path):
    """In an environment where nothing else is installed: torch's classes are unknown there."""
    pytest.importorskip("mypy")
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "megamoe").symlink_to(ROOT / "megamoe")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    python = tmp_path / "env" / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, "user.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    said = done.stdout
    types = re.findall(r'Revealed type is "([^"]*)"', said.replace("builtins.", ""))
    plan = "megamoe.planner.plan.Plan"
    assert types == [plan, "str", "tuple[int, ...]", plan], said
    errors = re.findall(r"user.py:\d+: error: (.*)", said)
    assert len(errors) == 3 and done.returncode == 1, said
    assert '"Plan" has no attribute "no_such_attribute"' in errors[0]
    assert 'incompatible type "str"; expected "int"' in errors[1]
    assert "Missing positional argument" in errors[2]
