"""ConSan's parts are few kernels, which are found and built without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import sanitize, sanitize_consan
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter builds nothing")
ROOT = Path(__file__).parents[2]
FOUND = """
import sys
from megamoe.engine.recording import cubins_of
from scripts.sanitize_consan import layers
for _, layer, num in layers(sys.argv[1]):
    for one in cubins_of(layer, [num]):
        print(one.kernel, one.hash, one.is_there)
"""


def kernels(recipe, env):
    """{hash: (kernel, whether the cache has it)} of Gluon's."""
    done = subprocess.run(
        [sys.executable, "-c", FOUND, recipe], env=env, cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    return {key: (name, is_there) for name, key, is_there in rows if name[0] != "_"}


def environment(**more):
    base = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return os.environ | base | more


@pytest.mark.parametrize(
    "recipe", ["w8a8", *(pytest.param(r, marks=pytest.mark.every) for r in ("bf16", "w4a8_block"))]
)
def test_a_part_has_at_most_six_kernels_of_its_own(recipe):
    under = kernels(recipe, environment(**sanitize_consan.environment()))
    names = [name for name, _ in under.values()]
    assert 4 <= len(names) <= 6 and names.count("mega_kernel") == 2
    assert not set(under) & set(kernels(recipe, environment()))  # not those of a run without it


def test_parts_are_consans_and_a_build_that_is_late_is_said(monkeypatch, capsys):
    assert sanitize.TOOLS["consan"] == sanitize_consan.PARTS
    assert "not built within 0 s" in sanitize.build_for_consan(["consan-bf16"], 0.01)
    assert "stage: building" in capsys.readouterr().out


@pytest.mark.every
def test_what_is_built_is_what_a_run_looks_for(tmp_path):
    """One recipe, minutes of a core with Triton's own ptxas."""
    env = environment(**sanitize_consan.environment(), TRITON_CACHE_DIR=str(tmp_path))
    build = [sys.executable, "scripts/sanitize_consan.py", "--compile-only", "consan-bf16"]
    assert {is_there for _, is_there in kernels("bf16", env).values()} == {"False"}
    subprocess.run(build, env=env, cwd=ROOT, check=True)
    assert {is_there for _, is_there in kernels("bf16", env).values()} == {"True"}
