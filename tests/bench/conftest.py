"""The command line, as the tests of tests/cli have it."""

from tests.cli.conftest import megamoe

__all__ = ["megamoe"]
