"""`megamoe plan` and `megamoe simulate` as a user meets them: tables, JSON, files, bad input."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from megamoe.planner.overrides import OVERRIDES
from megamoe.planner.plan import plan
from megamoe.problem import Problem

SMALL = ("--hidden", "1024", "--intermediate", "512", "--experts", "16", "--top-k", "4")


STUDY = "study: not a launch of this library (deep_gemm)"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tokens", "64", "--recipe", "w4a8_block"),
         ("mode", "one launch, and no host", "mega_kernel", "swap_ab 16x256x256", "as images",
          "symmetric", "of 232,448", "set by hbm", "GFLOP", "dispatch")),
        (("--tokens", "512", "--recipe", "w8a8", "--set", "mode=staged"),
         ("staged", "quantize", "place", "permute", "l1", "l2", "combine",
          "rows cross the links")),
        (("--tokens", "512", "--recipe", "w8a8", "--set", "mode=chain"),
         ("chain", "asked for", "exchange_kernel", "pull_kernel",
          "finish_kernel", "symmetric", "pull_sms")),
        (("--tokens", "64", "--hardware", "b200"),
         ("portable", "blackwell is opt-in", "gated_kernel")),
        (("--tokens", "200", "--set", "mode=fused"), ("2 x 132", "num_passes")),
    ],
    ids=["fused", "staged", "chain", "portable", "passes"],
)  # fmt: skip
def test_plan_prints_choices_launches_memory_and_floor(megamoe, args, words):
    code, text, _ = megamoe("plan", *args)
    assert code == 0
    for word in words:
        assert word in text, word
    assert "study" not in text


def test_plans_of_grouped_gemms_are_those_of_the_benchmark(megamoe):
    args = ("--gemm", "A,B", "--hardware", "b200", "--set", "backend=blackwell")
    code, text, _ = megamoe("plan", *args)
    words = ("A: 4096 x 7168", "tmem 128x128x256, 6 stages", "tmem 128x256x256, 4 stages",
             "n above 4096", "up to 512 tiles", "place_groups_kernel", "of 232,448")  # fmt: skip
    assert code == 0 and all(word in text for word in words)
    found = json.loads(megamoe("plan", *args, "--json")[1])
    assert found["B"]["launches"][1]["constants"]["HALVES"] == 2
    assert found["A"]["launches"][1]["constants"]["HALVES"] == 1


def test_plan_loses_no_reason_in_a_pipe(megamoe):
    _, text, _ = megamoe("plan", "deepseek-v3", "--tokens", "64")
    found = plan(Problem(64, 7168, 2048, 256, 8, 8, "w8a8"), "h200")
    assert "…" not in text and all(choice.why in text for choice in found.choices)
    assert all(len(line) < 400 for line in text.splitlines())


def test_plan_json_is_the_plan(megamoe):
    args = ("--tokens", "64", "--ranks", "1", "--set", "block_m=32", "--set", "mode=staged")
    found = json.loads(megamoe("plan", *args, "--json")[1])
    how = plan(Problem(**found["problem"]), "h200", block_m=32, mode="staged")
    assert [row["name"] for row in found["launches"]] == [one.name for one in how.launches]
    assert [row["grid"] for row in found["launches"]] == [list(one.grid) for one in how.launches]
    assert [row["constants"] for row in found["launches"]] == [
        one.config.constants() for one in how.launches
    ]
    chosen = {row["name"]: row for row in found["choices"]}
    assert chosen["block_m"]["value"] == 32 and chosen["block_m"]["why"].startswith("given")
    assert {row["name"]: row["num_bytes"] for row in found["memory"]} == {
        b.name: b.num_bytes for b in how.buffers
    }
    smem = found["shared_memory"]
    total = sum(term["num_bytes"] for term in smem["fixed"])
    total += smem["num_stages"] * sum(term["num_bytes"] for term in smem["stage"])
    assert total == smem["num_bytes"] <= smem["limit"]
    assert found["floor"]["time_us"] > 0 and found["study"] == ""


def test_plan_compares_machines_side_by_side(megamoe):
    code, text, _ = megamoe("plan", "deepseek-v3", "--compare", "h200,b200", "--tokens", "64")
    assert code == 0
    row = next(line for line in text.splitlines() if "backend" in line)
    assert "hopper" in row and "portable" in row
    assert "floor, us" in text and "symmetric, MB" in text
    both = json.loads(megamoe("plan", "deepseek-v3", "--compare", "h200,b200", "--json")[1])
    assert list(both) == ["h200", "b200"]


def test_what_cannot_run_is_shown_by_name_alone_and_marked(megamoe, tmp_path):
    """Fused prefill, split and Blackwell kernels: `--study` in tables, JSON, page, chart, SVG."""
    study = ("--study", "deep_gemm")
    code, text, _ = megamoe("plan", "deepseek-v4-pro", "--hardware", "b200", *study)
    assert code == 0 and STUDY in text and "blackwell" in text and "experts_per_wave" in text
    assert STUDY in megamoe("plan", "--compare", "h200,b200", *study)[1]
    assert json.loads(megamoe("plan", *study, "--json")[1])["study"] == STUDY
    small = ("simulate", *SMALL, "--ranks", "2", "--tokens", "64", "--mode", "split", *study)
    code, text, _ = megamoe(*small, "--out", str(tmp_path))
    assert code == 0 and text.count(STUDY) == 2  # above the table, above the chart
    assert STUDY in (tmp_path / "timeline.html").read_text()
    assert STUDY in (tmp_path / "exposed.svg").read_text()
    assert STUDY in json.loads((tmp_path / "trace.json").read_text())["otherData"]["study"]
    assert json.loads(megamoe(*small, "--no-files", "--json")[1])["study"] == STUDY
    for command in ("plan", "simulate"):
        code, _, errors = megamoe(command, "--study", "other")
        assert code == 2 and "study must be one of deep_gemm" in errors


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
    assert "study" not in text and "(simulated)" in text
    folder = tmp_path / "new" / "s"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "custom shape" in (folder / "timeline.html").read_text()
    svg = ET.parse(folder / "exposed.svg").getroot()
    labels = {e.text for e in svg.iter() if e.tag.endswith("text")}
    assert {"1", "2", "4", "8", "simulated"} <= labels


@pytest.mark.parametrize("mode", ["auto", "fused", "staged"])
def test_simulate_json_is_for_machines(megamoe, mode):
    code, text, errors = megamoe(
        "simulate", "tiny", "--ranks", "2", "--mode", mode, "--skew", "zipf", "--json", "--no-files"
    )
    found = json.loads(text)
    assert code == 0 and errors == "" and found["files"] == []
    assert found["mode"] == (mode if mode != "auto" else "chain") and found["study"] == ""
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
        (("--set", "block_m=7"), "block_m must be 8 or 16 or 32 or 64 or 128: wgmma's N; got 7"),
        (("--set", "block_m=many"), "block_m (tokens of a tile) must be an integer; got 'many'"),
        (("--set", "blok_m=8"), "did you mean block_m?"),
        (("--set", "block_m"), "--set takes name=value; got block_m"),
        (("--set", "num_stages=32"), "must lie between 2 and the"),
        (("--set", "kernel=magic"), "kernel must be one of swap_ab, gemm"),
        (
            ("--tokens", "64", "--set", "mode=split", "--set", "l1_sms=90"),
            "l1_sms must be a multiple of 8",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_says_what_got_and_fix(megamoe, command, args, words):
    files = ("--no-files",) if command == "simulate" else ()
    code, _, errors = megamoe(command, *args, *files)
    if words is None:
        words = "a shape without a preset needs hidden, intermediate, experts and top-k"
        assert "got no intermediate, no experts, no top-k; name a preset" in errors
    assert code in (2, 3)
    assert words in errors and "got" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("simulate", "tiny", "--ranks", "2", "--skew", "wild"), 2, "skew must be one of even"),
        (("simulate", "tiny", "--ranks", "2", "--mode", "magic"), 2, "mode must be one of"),
        (("simulate", "--tokens", "0"), 2, "a simulated call has launches; got 0 tokens"),
        (("simulate", "--tokens", "1000000"), 2, "at most 2,000,000 blocks"),
        (("simulate", "--out", "/proc/nope"), 2, "--out must be a folder that can be written"),
        (("simulate", "tiny", "--ranks", "8", "--skew", "hot_rank"), 2, "at least top_k experts"),
        (("simulate", "tiny", "--ranks", "2", "--counts", "/nowhere"), 2, "counts must be a JSON"),
        (("simulate", "--ranks", "16", "--mode", "fused"), 3, "fused calls take 8 ranks at most"),
        (("plan", "--compare", "h200,"), 2, "hardware must be one of"),
        (("plan", "--set", "backend=blackwell"), 3, "needs sm_100a"),
        (("plan", "--set", "backend=pallas"), 2, "backend must be one of auto, hopper"),
        (("plan", "--hardware", "b200", "--set", "backend=hopper"), 3, "needs sm_90a"),
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


def test_one_rank_is_one_rank_and_ids_of_the_checklist_are_not_shown(megamoe):
    _, text, _ = megamoe("plan", "--ranks", "1", "--tokens", "1")
    assert "1 token on one rank," in text
    _, more, _ = megamoe("simulate", "--ranks", "1", "--tokens", "8", "--no-files")
    assert "8 tokens a rank, 1 rank," in more
    _, study, _ = megamoe("plan", "--study", "deep_gemm")
    assert not re.search(r"\b[A-F]0\d\d\b", text + more + study)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("plan", "deepseek-v3", "--gemm", "A"), "got a preset; leave it out"),
        (("plan", "--gemm", "A", "--hidden", "512", "--cubins", "1"), "got --hidden, --cubins"),
        (("plan", "--ranks", "0"), "num_ranks must be at least 1; got 0"),
        (("plan", "--ranks", "3"), "256 experts over 3 ranks; use 1, 2, 4, 8, 16, 32 or 64 ranks"),
        (("compile", "tiny", "--tokens", "4-2"), "a range of tokens must go up; got 4-2"),
        (("compile", "tiny", "--ranks", "0"), "num_ranks must be at least 1"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_says_why(megamoe, args, words):
    code, out, err = megamoe(*args)
    assert (code, out) == (2, "") and words in err and not err.startswith("\n")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--recipe", "nvfp4a16", "--ranks", "1"), "hopper has no kernel for recipe nvfp4a16"),
        (("--gemm", "A"), "no other backend has a grouped GEMM alone on sm_90a"),
        (("--tokens", "0", "--ranks", "1"), "no launches: a call without tokens computes nothing"),
        (("--set", "backend=reference"), "no launches: computed by the oracle"),
    ],
    ids=str,
)
def test_a_plan_gives_the_reason_that_holds(megamoe, args, says):
    code, out, _ = megamoe("plan", *args)
    assert code == 0 and says in out
    assert "asked for" not in out or "backend=reference" in args


@pytest.mark.parametrize("command", [("plan",), ("plan", "--gemm", "A"), ("simulate", "tiny")])
def test_a_machine_that_nothing_was_run_on_is_named(megamoe, command):
    for machine in ("h100", "h20", "b200"):
        code, out, _ = megamoe(*command, "--hardware", machine)
        assert code == 0 and "never run on it by us; tested is NVIDIA H200" in out
    assert "never run" not in megamoe(*command, "--hardware", "h200")[1]


def test_machines_side_by_side_have_the_note_too(megamoe):
    assert "NVIDIA B200 (HGX): never run" in megamoe("plan", "--compare", "h200,b200")[1]
