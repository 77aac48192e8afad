"""Every backend is an object with the same three functions."""

import inspect

import pytest

from megamoe.engine.backends import BACKENDS
from megamoe.engine.interface import Backend, backend_named
from megamoe.planner.plan import BACKEND_MODES

FUNCTIONS = ("prepare", "run", "rows")


@pytest.mark.parametrize("name", BACKEND_MODES)
def test_every_backend_has_the_interface(name):
    one = backend_named(name)
    assert isinstance(one, Backend) and one.name == name
    for function in FUNCTIONS:
        wanted = inspect.signature(getattr(Backend, function)).parameters
        have = inspect.signature(getattr(type(one), function)).parameters
        assert list(have)[: len(wanted)] == list(wanted), function
        more = list(have.values())[len(wanted) :]  # of Gluon's two, which shared experts may join
        assert all(parameter.default is None for parameter in more), function


def test_every_row_of_the_table_of_backends_is_one():
    assert {row.name for row in BACKENDS} == set(BACKEND_MODES)


def test_portable_and_the_oracle_have_no_other_functions():
    for name in ("portable", "reference"):
        public = {one for one in vars(type(backend_named(name))) if not one.startswith("_")}
        assert public - {"name", "has_fp8_rows"} == set(FUNCTIONS)
