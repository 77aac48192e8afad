"""The command line as a script sees it: output, JSON, exit codes."""

import json
import os
import subprocess
import sys

import pytest
import torch
import typer

import megamoe
from megamoe.cli import main
from megamoe.cli.shared import Bars
from megamoe.formats.spec import FORMATS, RECIPES


@pytest.fixture
def megamoe_here(request):
    return request.getfixturevalue("megamoe")  # the command, beside the module of that name


def megamoe_cli(*args):
    return subprocess.run(
        [sys.executable, "-m", "megamoe", *args], capture_output=True, text=True, timeout=300
    )


def test_run_prints_a_table_and_ends_with_correct():
    done = megamoe_cli("run", "tiny", "--tokens", "8", "--ranks", "2", "--recipe", "w4a8_block")
    assert done.returncode == 0, done.stderr
    for words in ("experts touched", "FLOP/s", "bit for bit", "smaller than BF16"):
        assert words in done.stdout
    assert done.stdout.strip().endswith("correct")


def test_run_json_is_for_machines(megamoe_here):
    _, out, err = megamoe_here("run", "tiny", "--tokens", "8", "--json")
    result = json.loads(out)
    assert result["ok"] is True and result["problem"]["num_tokens"] == 8
    assert err == ""


def test_formats_lists_every_format_and_recipe(megamoe_here):
    listed = json.loads(megamoe_here("formats", "--json")[1])
    assert list(listed["formats"]) == list(FORMATS) and list(listed["recipes"]) == list(RECIPES)
    text = megamoe_here("formats")[1]
    assert all(name in text for name in (*FORMATS, *RECIPES))


def test_doctor_says_what_auto_picks(megamoe_here):
    assert json.loads(megamoe_here("doctor", "--json")[1])["best"]["cpu"] == "reference"
    assert "reference" in megamoe_here("doctor")[1]


def test_version(megamoe_here):
    assert megamoe_here("--version")[1].strip() == megamoe.__version__


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("run", "gpt-9"), 2, "preset must be one of"),
        (("run", "tiny", "--recipe", "w1a1"), 2, "recipe must be one of"),
        (("run", "tiny", "--tokens", "0"), 2, "at least one token"),
        (("run", "tiny", "--tokens", "-3"), 2, "got -3"),
        (("run", "tiny", "--ranks", "3"), 2, "8 experts over 3 ranks"),
        (("run", "tiny", "--scale", "7"), 2, "scale must be auto or lie in (0, 1]"),
        (("run", "tiny", "--scale", "big"), 2, "got big"),
        (("run", "tiny", "--device", "tpu"), 2, "cpu or cuda[:N]"),
        (("run", "tiny", "--device", "cuda:99"), 3, "use --device cpu"),
        (("run", "tiny", "--backend", "hopper"), 3, "use reference"),
        (("run", "tiny", "--tokens", "many"), 2, "--tokens"),
        (("run", "tiny", "--tokens", "1000000000000"), 3, "use fewer --tokens"),
        (("run", "tiny", "--seed", "99999999999999999999"), 2, "seed must lie between"),
        (("fly",), 2, "No such command"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_errors_are_one_readable_line_and_an_exit_code(megamoe_here, args, code, words):
    found, _, err = megamoe_here(*args)
    assert found == code
    assert words in err
    assert "Traceback" not in err


def test_a_shell_sees_the_exit_code():
    assert megamoe_cli("run", "gpt-9").returncode == 2


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError(), 4, "memory ran out"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            4,
            "DefaultCPU",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), 4, "CUDA out of memory"),
        (ValueError("no luck"), 70, "a defect of megamoe"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else None,
)
def test_only_a_wrong_result_ends_with_1(megamoe_here, monkeypatch, error, code, words):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr("megamoe.bench.job.run", fail)
    found, _, err = megamoe_here("run", "tiny")
    assert found == code and words in err


def test_a_wrong_result_ends_with_1(megamoe_here, monkeypatch):
    from megamoe.bench import job

    monkeypatch.setattr(job.Result, "ok", property(lambda self: False))
    assert megamoe_here("run", "tiny", "--tokens", "2")[0] == 1


def test_a_terminal_without_unicode_gets_plain_signs():
    done = subprocess.run(
        [sys.executable, "-m", "megamoe", "simulate", "tiny", "--no-files"],
        capture_output=True, timeout=300, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"#" in done.stdout and done.stdout.isascii()


def test_a_bar_follows_a_total_that_is_found_later():
    with Bars(quiet=False) as bars:
        bars("layer", 0, 1)
        bars("layer", 762, 800)
        (task,) = bars.bars.tasks
    assert (task.completed, task.total) == (762, 800)


def test_a_reader_that_has_gone_is_no_wrong_result():
    command = f"{sys.executable} -m megamoe formats --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 141) and "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("args", [("formats",), ("formats", "--json")], ids=" ".join)
def test_a_full_disk_is_no_defect(args):
    """Printed by rich, and by `print`, whose text is written when the program ends."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megamoe", *args],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "got No space left on device" in done.stderr


def test_a_flag_shows_no_value_in_help():
    """`<bool>` beside a flag would say that it takes one."""

    def flags(command, name):
        for word, one in getattr(command, "commands", {}).items():
            yield from flags(one, f"{name} {word}")
        for param in command.params:
            if getattr(param, "is_flag", False):
                yield f"{name} {param.opts[0]}", param.metavar

    found = dict(flags(typer.main.get_command(main.app), "megamoe"))
    assert len(found) > 20
    assert [name for name, metavar in found.items() if metavar != ""] == []


@pytest.mark.parametrize("args", [(), ("bench",), ("plan",), ("bench", "gemm")], ids=" ".join)
def test_help_takes_no_value_either(megamoe_here, args):
    code, text, _ = megamoe_here(*args, "--help")
    assert code == 0 and "--help" in text and "bool" not in text


def test_the_default_preset_is_in_the_help(megamoe_here):
    for command in ("plan", "simulate"):
        assert "default: deepseek-v4-flash" in " ".join(
            megamoe_here(command, "--help")[1].replace("│", " ").split()
        )
