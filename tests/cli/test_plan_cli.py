"""`megamoe plan` and `megamoe simulate` as a user meets them: tables, JSON, files, bad input."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from megamoe.studies.deep_gemm.overrides import OVERRIDES

SMALL = ("--hidden", "1024", "--intermediate", "512", "--experts", "16", "--top-k", "4")


def test_plan_prints_reasons_shared_memory_workspace_and_floor(megamoe):
    code, text, _ = megamoe("plan", "deepseek-v4-pro", "--tokens", "512", "--hardware", "b200")
    assert code == 0
    for words in (
        "NVIDIA B200", "A020", "experts_per_wave", "load_weights", "8 stages", "of 232,448",
        "token_src_metadata", "of them control", "set by hbm", "GFLOP", "dispatch",
    ):  # fmt: skip
        assert words in text, words


def test_plan_compares_machines_side_by_side(megamoe):
    code, text, _ = megamoe("plan", "deepseek-v3", "--compare", "h200,b200", "--tokens", "64")
    assert code == 0
    row = next(line for line in text.splitlines() if "num_sms" in line)
    assert "132" in row and "148" in row
    assert "floor, us" in text and "workspace, MB" in text
    both = json.loads(megamoe("plan", "deepseek-v3", "--compare", "h200,b200", "--json")[1])
    assert list(both) == ["h200", "b200"]


def test_plan_json_is_whole(megamoe):
    found = json.loads(megamoe("plan", *SMALL, "--ranks", "4", "--set", "block_m=64", "--json")[1])
    chosen = {row["name"]: row for row in found["choices"]}
    assert chosen["block_m"]["value"] == 64 and chosen["block_m"]["why"].startswith("given")
    smem = found["shared_memory"]
    total = sum(t["num_bytes"] for t in smem["fixed"])
    total += smem["num_stages"] * sum(t["num_bytes"] for t in smem["stage"])
    assert total == smem["num_bytes"] <= smem["limit"]
    assert (
        sum(r["num_bytes"] for r in found["workspace"]["regions"])
        <= (found["workspace"]["num_bytes"])
    )
    assert found["floor"]["time_us"] > 0 and found["problem"]["recipe"] == "w4a8_block"


def test_a_preset_may_be_changed_number_by_number(megamoe):
    found = json.loads(megamoe("plan", "tiny", "--experts", "16", "--ranks", "4", "--json")[1])
    assert found["problem"]["num_experts"] == 16 and found["problem"]["hidden"] == 256
    assert "tiny, changed" in megamoe("plan", "tiny", "--experts", "16", "--ranks", "4")[1]


def test_simulate_prints_the_prediction_and_writes_three_files(megamoe, tmp_path):
    code, text, _ = megamoe(
        "simulate", *SMALL, "--ranks", "4", "--tokens", "64", "--out", str(tmp_path / "new" / "s")
    )
    assert code == 0
    for words in ("predicted time", "floor", "exposed communication", "tail", "rows in", "L1"):
        assert words in text
    folder = tmp_path / "new" / "s"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "custom shape" in (folder / "timeline.html").read_text()
    svg = ET.parse(folder / "exposed.svg").getroot()
    labels = {e.text for e in svg.iter() if e.tag.endswith("text")}
    assert {"1", "2", "4", "8"} <= labels


@pytest.mark.parametrize("mode", ["fused", "split", "staged"])
def test_simulate_json_is_for_machines(megamoe, mode):
    code, text, errors = megamoe(
        "simulate", "tiny", "--ranks", "2", "--mode", mode, "--skew", "zipf", "--json", "--no-files"
    )
    found = json.loads(text)
    assert code == 0 and errors == "" and found["mode"] == mode and found["files"] == []
    assert found["time_us"] >= found["floor_us"] > 0
    again = megamoe(
        "simulate", "tiny", "--ranks", "2", "--mode", mode, "--skew", "zipf", "--json", "--no-files"
    )
    assert json.loads(again[1]) == found


def test_simulate_takes_measured_counts(megamoe, tmp_path):
    file = tmp_path / "counts.json"
    file.write_text(json.dumps([[128] + [0] * 7, [0] * 7 + [128]]))
    args = ("simulate", "tiny", "--ranks", "2", "--tokens", "64", "--no-files", "--json")
    found = json.loads(megamoe(*args, "--counts", str(file))[1])
    assert found["usage"]["nvlink"] == 0.0


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("gpt-9",), "preset must be one of"),
        (("--hardware", "h900"), "hardware must be one of h100, h200, h20"),
        (("--ranks", "7"), "must be a multiple of num_ranks; got 256 experts over 7 ranks"),
        (("tiny", "--top-k", "9", "--ranks", "1"), "got top_k 9 with 8 experts"),
        (("tiny", "--hidden", "100", "--ranks", "2"), "multiple of 32; got 100"),
        (("--hidden", "4096"), None),
        (("--recipe", "w1a1"), "recipe must be one of"),
        (("--tokens", "-1"), "num_tokens must not be negative; got -1"),
        (("--set", "block_m=7"), "block_m must be one of 8, 16, 32, 64, 128, 256; got 7"),
        (("--set", "block_m=many"), "block_m must be an integer; got 'many'"),
        (("--set", "blok_m=8"), "did you mean block_m?"),
        (("--set", "block_m"), "--set takes name=value; got block_m"),
        (("--set", "num_stages=32"), "shared memory of a CTA must not exceed 232448 bytes"),
        (("--set", "block_n=256"), "block_m must be at most 32"),
        (("--set", "ring_rows=100"), "ring_rows must be a positive multiple of"),
        (("deepseek-v4-pro", "--tokens", "9000000"), "the workspace must fit"),
        (("--tokens", "64", "--set", "max_tokens=8"), "at most max_tokens = 8 tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_says_what_got_and_fix(megamoe, command, args, words):
    files = ("--no-files",) if command == "simulate" else ()
    code, _, errors = megamoe(command, *args, *files)
    if words is None:
        words = "a shape without a preset needs hidden, intermediate, experts and top-k"
        assert "got no intermediate, no experts, no top-k; name a preset" in errors
    assert code == 2
    assert words in errors and "got" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("simulate", "tiny", "--ranks", "2", "--skew", "wild"), 2, "skew must be one of even"),
        (("simulate", "tiny", "--ranks", "2", "--mode", "magic"), 2, "mode must be one of"),
        (("simulate", "tiny", "--ranks", "8", "--skew", "hot_rank"), 2, "at least top_k experts"),
        (("simulate", "tiny", "--ranks", "2", "--counts", "/nowhere"), 2, "counts must be a JSON"),
        (("simulate", "--ranks", "16", "--mode", "fused"), 3, "fused reaches at most 8 ranks"),
        (("plan", "--compare", "h200,"), 2, "hardware must be one of"),
        (("plan", "--set", "backend=blackwell"), 3, "runs hopper or portable; got blackwell"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_only_one_of_them_refuses(megamoe, args, code, words):
    found, _, errors = megamoe(*args)
    assert found == code and words in errors and "Traceback" not in errors


def test_counts_of_the_wrong_shape_and_a_folder_that_is_a_file_are_refused(megamoe, tmp_path):
    file = tmp_path / "counts.json"
    args = ("simulate", "tiny", "--ranks", "2", "--tokens", "8")
    file.write_text("[[1, 2], [3]]")
    assert "2 ranks by 8 experts" in megamoe(*args, "--counts", str(file))[2]
    file.write_text('{"a": 1}')
    assert "got" in megamoe(*args, "--counts", str(file))[2]
    code, _, errors = megamoe(*args, "--out", str(file))
    assert code == 2 and "--out must be a folder that can be written" in errors


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_help_names_every_override(megamoe, command):
    code, text, _ = megamoe(command, "--help")
    assert code == 0 and "--set" in text
    assert all(name in text for name in OVERRIDES)


@pytest.mark.parametrize("args", [["plan", "tiny"], ["simulate", "tiny", "--no-files"]], ids=str)
def test_no_torch_is_loaded(args):
    code = (
        "import sys; from megamoe.cli.main import app; "
        f"app({[*args, '--ranks', '2']!r}, standalone_mode=False); "
        "sys.exit(bool({'torch', 'triton', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reason_stands_beside_every_choice(megamoe):
    assert all(row["why"] for row in json.loads(megamoe("plan", "--json")[1])["choices"])
