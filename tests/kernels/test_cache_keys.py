"""Keys of Triton's disk cache do not depend on what a process hashed before.

`megamoe compile` fills the cache in other processes than those that launch.
"""

import json
import subprocess
import sys

import pytest

from megamoe.kernels.blackwell import gemm
from megamoe.kernels.common import compat
from megamoe.kernels.gluon import dispatch, permute, pull
from megamoe.kernels.hopper.gemm import plain, swap_ab
from megamoe.kernels.hopper.mega import kernel
from megamoe.kernels.portable import gemm as portable
from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

MODULES = plain, swap_ab, kernel, gemm, dispatch, permute, pull, portable
# argv: modules; hashes every function in the order given, or backwards
HASH = """
import importlib, json, sys
from triton.runtime.jit import JITFunction
order, *names = sys.argv[1:]
functions = {f"{name}.{key}": value for name in names
             for key, value in vars(importlib.import_module(name)).items()
             if isinstance(value, JITFunction)}
for key in sorted(functions, reverse=order == "backwards"):
    functions[key].cache_key
print(json.dumps({key: functions[key].cache_key for key in sorted(functions)}))
"""


def test_keys_are_the_same_whichever_was_hashed_first():
    names = [module.__name__ for module in MODULES]
    runs = [
        subprocess.Popen([sys.executable, "-c", HASH, order, *names], stdout=subprocess.PIPE)
        for order in ("forwards", "backwards")
    ]
    forwards, backwards = (json.loads(run.communicate(timeout=120)[0]) for run in runs)
    assert len(forwards) > 100 and forwards == backwards


class Function:
    def __init__(self, module, calls):
        self.__module__, self.calls = module, calls

    @property
    def cache_key(self):
        self.calls.append("hash")


def test_functions_of_others_are_merged_as_before():
    calls = []

    class Finder:
        def _update_hash(self, function):
            calls.append("merge")

    compat._hash_callees_first(Finder)
    Finder()._update_hash(Function("elsewhere", calls))
    assert calls == ["merge"]
    Finder()._update_hash(Function("megamoe.kernels.gluon.pull", calls))
    assert calls == ["merge", "hash", "merge"]
