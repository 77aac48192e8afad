"""racecheck's text, read pair by pair: what the table has is explained, and nothing else is.

`data/racecheck.txt` has the shape of compute-sanitizer's analysis reports; lines are filled in.
"""

import ast
from pathlib import Path

import pytest

from scripts import sanitize
from scripts.sanitize_races import EXPLAINED, KERNELS, function_at

TEXT = (Path(__file__).parent / "data" / "racecheck.txt").read_text()
FILES = {
    "gluon/mega/scheduler.py": ("_push", "pop_item"),
    "hopper/mega/kernel.py": ("mega_kernel",),
    "hopper/gemm/epilogue.py": ("post_tile", "read_tile"),
}


def line_of(file, name):
    """The last line of a function."""
    tree = ast.parse((KERNELS / file).read_text())
    return next(n.end_lineno for n in tree.body if getattr(n, "name", "") == name)


LINES = {name: line_of(file, name) for file, names in FILES.items() for name in names}
OUTPUT = TEXT.format(**LINES)
SILENT = "done hopper-bf16\n========= RACECHECK SUMMARY: 0 hazards displayed\n"


def judged(output, code=9):
    return sanitize.judge("racecheck", "hopper-bf16", code, output, 13.0)


def test_pairs_of_the_table_are_explained():
    found = judged(OUTPUT)
    assert found.is_explained and found.is_fine and not found.is_clean
    line = "racecheck hopper-bf16: explained, 3 hazards, 3 explained, 0 unexplained (13 s)"
    assert str(found) == line


@pytest.mark.parametrize(
    ("old", "new", "num"),
    [
        ("epilogue.py:{read_tile}", "epilogue.py:{post_tile}", 1),  # another pair of functions
        ("gemm_swap_ab_kernel(int *)", "gemm_kernel", 1),  # of another kernel
        (" in /run/megamoe/kernels/hopper/gemm/epilogue.py:{post_tile}", "", 1),  # without a line
        ("+0x7120 in /run/megamoe/kernels/gluon/mega/scheduler.py:{pop_item}",
         "+0x7120 in /run/megamoe/kernels/gluon/mega/scheduler.py:{_push}", 1),  # one of two reads
        ("3 hazards displayed (3 errors", "3 hazards displayed (37 errors", 34),  # not shown
    ],
)  # fmt: skip
def test_what_the_table_does_not_have_or_the_text_does_not_show_is_found(old, new, num):
    assert old in TEXT
    found = judged(TEXT.replace(old, new).format(**LINES))
    assert not found.is_explained and not found.is_fine and f"{num} unexplained" in found.said


@pytest.mark.parametrize(
    "lost",
    [
        "========= Warning: Detected overflow of tracked cuda::barrier structures.",
        "========= Internal Sanitizer Error: launching x, it didn't track the launch. Errors might",
    ],
)
@pytest.mark.parametrize("text", [OUTPUT, SILENT])
def test_a_tool_that_lost_track_says_nothing(lost, text):
    found = judged(f"{lost}\n{text}", 0)
    assert not found.is_fine and lost[10:30] in found.said


def test_a_run_that_did_not_end_is_not_explained():
    assert not judged(OUTPUT, 124).is_fine
    assert not judged(OUTPUT.replace("done hopper-bf16", "")).is_fine


def test_the_table_names_functions_that_are_there():
    for _, *functions in EXPLAINED:
        for function in functions:
            file, _, name = function.rpartition(".")
            path = f"{file.replace('.', '/')}.py"
            assert function_at(f"x/megamoe/kernels/{path}", str(line_of(path, name))) == function


def control(part, is_clean):
    return sanitize.Found("racecheck", part, is_clean, "", 1.0)


def test_controls_say_whether_the_tool_can_judge():
    for ordered, racing, word in (
        (True, False, "tells"), (False, False, "cannot"), (True, True, "cannot"),
    ):  # fmt: skip
        pair = [control("control-ordered", ordered), control("control-racing", racing)]
        assert f"racecheck {word}" in sanitize.verdict(pair)
    assert "did not run" in sanitize.verdict([])


SAYS = "echo '========= ERROR SUMMARY: 0 errors'"


def test_the_newest_sanitizer_that_runs_here_is_taken_with_room_for_barriers(tmp_path, monkeypatch):
    for name, version in (("old", "2025.3.1.0"), ("new", "2026.3.0.0")):
        (tmp_path / name).mkdir()
        tool = tmp_path / name / "compute-sanitizer"
        tool.write_text(f"#!/bin/sh\necho 'Version {version} (build 1)'\n{SAYS}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'old'}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    new = tmp_path / "new" / "compute-sanitizer"
    assert sanitize.sanitizer(new) == (str(new), "2026.3.0.0")
    assert sanitize.sanitizer()[1] == "2025.3.1.0"
    new.write_text(new.read_text() + "echo no such driver; exit 1\n")
    assert sanitize.sanitizer(new)[1] == "2025.3.1.0"
    line = " ".join(sanitize.command("racecheck", "graphs", str(new)))
    assert "--print-limit 0 --num-cuda-barriers 256" in line
