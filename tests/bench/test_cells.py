"""The workloads as data, the floors by hand, the statistics, the recorded peers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.bench import peers
from megamoe.bench.cells import (
    EVEN_GEMMS,
    PRESETS,
    PUBLIC,
    SEED,
    SHARES,
    TOKENS,
    UNEVEN_GEMMS,
    cells_named,
    gemms_named,
)
from megamoe.bench.floors import Ceilings, layer_cost
from megamoe.bench.stats import Timing, geomean
from megamoe.bench.workloads import MODELS
from megamoe.errors import FileError, NotAvailable, RangeError
from megamoe.planner.numerics import narrowest_mma
from megamoe.routing.samplers import sample_routing

H200 = Ceilings(4293.3, 4345.2, {"bf16": 784.5, "fp8": 1492.9}, 4.7, "recorded")
RECORDED = Path(__file__).parent.parent.parent / "benchmarks" / "h200"
PEERS = peers.RECORDED


def test_the_fifteen_cells():
    cells = cells_named(list(SHARES))
    assert len(cells) == 15
    assert [c.num_pairs for c in cells if c.shape.name == "v3-ep8"] == [64, 512, 4096, 16384, 65536]
    assert [c.num_pairs for c in cells if c.shape.name == "pro-ep8"] == [6 * t for t in TOKENS]
    pro = SHARES["pro-ep8"]
    assert (pro.hidden, pro.intermediate, pro.num_experts, pro.top_k) == (7168, 3072, 48, 6)


def test_the_public_shape_has_token_counts_of_its_own():
    cells = cells_named(["public-48"])
    assert [c.num_tokens for c in cells] == [8, 32, 64, 128, 256]
    assert [c.num_tokens for c in cells_named(["public-48"], [3])] == [3]
    s = PUBLIC["public-48"]
    assert (s.num_experts, s.hidden, s.intermediate, s.top_k) == (48, 6144, 2048, 8)
    touched = [len(sample_routing(c.num_tokens, 48, 8, seed=SEED)[0].unique()) for c in cells]
    assert touched == [39, 48, 48, 48, 48]  # docs/benchmarking.md


def test_presets_keep_what_the_layer_computes():
    assert list(PRESETS) == list(MODELS)
    oss = PRESETS["gpt-oss-120b"]
    assert oss.has_bias and oss.options.activation == "gpt_oss" and oss.hidden == 2880


def test_cells_by_name():
    assert [c.name for c in cells_named(["flash-ep8/64", "tiny"], [3])] == [
        "flash-ep8/64",
        "tiny/3",
    ]
    assert len(cells_named(["tiny/8", "tiny/8"])) == 1


@pytest.mark.parametrize(
    ("names", "tokens", "words"),
    [
        (["tiny/many"], None, "flash-ep8/64"),
        (["mixtral"], None, "workload must be one of"),
        (["tiny"], [0], "at least one token"),
        ([], None, "at least one workload"),
    ],
)
def test_bad_names_are_refused(names, tokens, words):
    with pytest.raises(RangeError, match=words):
        cells_named(names, tokens)


def test_gemm_shapes_are_those_of_the_list():
    assert [(s.num_groups, s.k, s.n, sum(s.rows)) for s in UNEVEN_GEMMS.values()] == [
        (8, 7168, 4096, 1024), (8, 2048, 7168, 1024), (2, 4096, 3072, 512), (2, 1536, 4096, 512),
    ]  # fmt: skip
    for name, s in EVEN_GEMMS.items():
        assert name == f"{s.num_groups}x{s.rows[0]}" and len(set(s.rows)) == 1
    with pytest.raises(RangeError, match="shape must be one of A, B, C, D"):
        gemms_named(["E"])


def test_the_seed_touches_as_many_experts_as_the_recorded_runs():
    for name, touched in (("flash-ep8", 25), ("pro-ep8", 33), ("v3-ep8", 27)):
        s = SHARES[name]
        assert len(sample_routing(8, s.num_experts, s.top_k, seed=SEED)[0].unique()) == touched


def test_floor_by_hand_where_weights_decide():
    cell = cells_named(["flash-ep8/8"])[0]
    expert = 3 * 4096 * 2048 * 17 // 32  # MXFP4: 4 bits and an eighth of a byte per 32
    cost = layer_cost(cell, 25, expert, "bf16")
    assert cost.num_bytes == 25 * expert + 4 * 8 * 4096
    us, by = cost.floor(H200)
    assert by == "hbm" and us == pytest.approx(76.95, abs=0.01)


def test_floor_by_hand_where_arithmetic_decides():
    cell = cells_named(["flash-ep8/8192"])[0]
    cost = layer_cost(cell, 32, 3 * 4096 * 2048, "fp8")
    assert cost.flops == 6 * 49152 * 4096 * 2048
    us, by = cost.floor(H200)
    assert by == "fp8" and us == pytest.approx(1657.2, abs=0.1)


def test_a_type_without_a_peak_takes_the_next_wider_one():
    assert H200.peak("fp4") == (1492.9, "fp8")
    with pytest.raises(NotAvailable, match="measured peak"):
        Ceilings(1, 1, {}, 0, "").peak("fp8")
    assert [narrowest_mma(r) for r in ("bf16", "w8a8", "w4a8_block", "w4a4")] == [
        "bf16", "fp8", "fp8", "fp4",
    ]  # fmt: skip


def test_timing_is_the_median_and_the_spread_of_rounds():
    timing = Timing(((10.0, 11.0, 90.0), (12.0, 12.0, 12.0)), "graph")
    assert timing.us == 12.0 and timing.low_us == 10.0 and timing.count == 6
    assert timing.spread == pytest.approx(1.0 / 12.0)
    with pytest.raises(RangeError):
        Timing(((),), "graph")


def test_geometric_mean():
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)
    for bad in ([], [1.0, 0.0]):
        with pytest.raises(RangeError):
            geomean(bad)


def test_the_recorded_peers_cover_the_fifteen_cells():
    found = peers.load(PEERS)
    assert list(found.cells) == [c.name for c in cells_named(list(SHARES))]
    assert found.common == ("dg-masked", "tk-bf16")
    assert found.best("v3-ep8/2048") == ("dg-contig", 1475.1)
    assert "580.159.04" in found.provenance and "512 MB" in found.method
    ratios = found.ratios("flash-ep8/8", 291.8)
    assert ratios["best"] == pytest.approx(2.0) and ratios["dg-masked"] < 1.5
    assert found.ratios("tiny/8", 1.0) == {}


def test_the_published_peers_cover_the_public_shape():
    found = peers.load(RECORDED / "peers-public-48.json")
    assert list(found.cells) == [c.name for c in cells_named(["public-48", "public-48/8@34"])]
    assert found.common == ("public-fp8", "public-mxfp4")
    best = [found.best(f"public-48/{tokens}") for tokens in PUBLIC["public-48"].tokens]
    assert [us for _, us in best] == [244.5, 330.8, 355.3, 419.0, 434.2]
    assert {name for name, _ in best} == {"public-mxfp4"}
    assert found.cells["public-48/128"]["public-fp8"] == 496.3
    assert found.cells["public-48/8@34"] == found.cells["public-48/8"]
    assert found.ratios("public-48/8", 489.0)["best"] == pytest.approx(2.0)
    assert "published, not measured by us" in found.provenance


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"cells": {"a/1": {"p": "fast"}}}', '{"cells": {"a/1": {"p": 0}}}']
)
def test_a_bad_peers_file_is_refused(tmp_path, text):
    path = tmp_path / "peers.json"
    path.write_text(text)
    with pytest.raises(FileError, match="peers file"):
        peers.load(path)
    with pytest.raises(FileError, match="readable"):
        peers.load(tmp_path / "none.json")


def test_the_data_files_need_no_torch():
    names = ("cells", "stats", "floors", "peers", "record")
    code = "; ".join(f"import megamoe.bench.{n}" for n in names)
    code += "; import sys; sys.exit(bool({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert json.loads(PEERS.read_text())["about"]
