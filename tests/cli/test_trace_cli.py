"""`megamoe trace` as a user meets it: stamps rendered without a GPU, and what is refused."""

import json
import subprocess
import sys

import pytest
import torch

from tests.trace.support import launch


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "saved" / "stamps.json"
    path.parent.mkdir()
    path.write_text(launch(name="flash-ep8/8", plain_us=100.0, traced_us=104.0).to_json())
    return path


def test_a_saved_file_is_rendered_beside_its_simulation(megamoe, file, tmp_path):
    out = tmp_path / "new" / "folder"
    code, text, errors = megamoe("trace", str(file), "--out", str(out))
    assert code == 0, errors
    for words in (
        "measured", "simulated", "L1 beside L2", "loads, an SM", "pool ready", "tail", "barrier",
        "100.0 us without, 104.0 us with, +4.0%: within the bar of 10%", "L1 weights in",
    ):  # fmt: skip
        assert words in text, words
    assert {p.name for p in out.iterdir()} == {
        "stamps.json", "timeline.json", "timeline.html", "trace.json"
    }  # fmt: skip
    assert (out / "stamps.json").read_text() == file.read_text()
    assert [line["source"] for line in json.loads((out / "timeline.json").read_text())] == [
        "measured", "simulated"
    ]  # fmt: skip
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    page = (out / "timeline.html").read_text()
    assert "<b>measured</b>" in page and "<b>simulated</b>" in page


def test_files_lie_beside_the_stamps_unless_another_folder_is_given(megamoe, file):
    assert megamoe("trace", str(file), "--no-files")[0] == 0
    assert len(list(file.parent.iterdir())) == 1
    assert megamoe("trace", str(file))[0] == 0
    assert len(list(file.parent.iterdir())) == 4


def test_json_is_for_machines(megamoe, file):
    code, text, errors = megamoe("trace", str(file), "--no-files", "--json")
    found = json.loads(text)
    assert code == 0 and errors == "" and found["folder"] == "" and found["faults"] == []
    assert found["overhead"] == pytest.approx(0.04)
    assert {row["name"] for row in found["figures"]} >= {"call", "tail", "stamping"}


def test_stamps_of_half_a_launch_end_with_1(megamoe, file):
    facts = json.loads(file.read_text())
    facts["events"] = facts["events"][: len(facts["events"]) // 2]
    file.write_text(json.dumps(facts))
    code, text, _ = megamoe("trace", str(file), "--no-files")
    assert code == 1 and "NOT WHOLE" in text and "have no block" in text


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("nowhere.json",), 2, "a file of stamps must be readable"),
        (("flash-ep8",), 2, "one workload at one number of tokens; got flash-ep8"),
        (("huge/8",), 2, "workload must be one of"),
        (("flash-ep8/8", "--device", "cpu"), 3, "then render what it saved here"),
        (("flash-ep8/8", "--recipe", "w1a1", "--device", "cpu"), 2, "recipe must be one of"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_errors_are_one_readable_line_and_an_exit_code(megamoe, args, code, words):
    found, _, errors = megamoe("trace", *args)
    assert found == code and words in errors and "Traceback" not in errors


def test_another_machine_and_a_bad_folder(megamoe, file):
    assert megamoe("trace", str(file), "--no-files", "--hardware", "h100")[0] == 0
    assert "hardware must be one of" in megamoe("trace", str(file), "--hardware", "h900")[2]
    code, _, errors = megamoe("trace", str(file), "--out", str(file))
    assert code == 2 and "--out must be a folder" in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(megamoe):
    code, _, errors = megamoe("trace")
    assert code == 3 and "needs an H100, H200 or H20" in errors and "stamps.json" in errors


def test_rendering_loads_no_torch(file):
    code = (
        "import sys; from megamoe.cli.main import app; "
        f"app({['trace', str(file), '--no-files']!r}, standalone_mode=False); "
        "sys.exit(bool({'torch', 'triton', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
