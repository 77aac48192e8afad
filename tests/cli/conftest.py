"""What the tests of the command line share."""

import sys

import pytest

from megamoe.cli import main as cli


@pytest.fixture
def megamoe(monkeypatch, capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["megamoe", *args])
        monkeypatch.setenv("COLUMNS", "140")
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return run
