"""The documentation: the site builds without a warning, snippets run, the reference is complete."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import megamoe as mm
from megamoe.tested import TESTED, TRITON_OF_TORCH

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import api_docs  # noqa: E402

FENCE = re.compile(r"(?:<!-- ([^\n]*) -->\n)?```python\n(.*?)```", re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = {str(page.relative_to(ROOT)): FENCE.findall(page.read_text()) for page in PAGES}
SNIPPETS = {name: found for name, found in SNIPPETS.items() if found and name != "docs/api.md"}


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_run_in_the_order_of_their_page(name):
    """A comment `<!-- not run: why -->` before a fence says why it is not run here."""
    parts = [compile(code, name, "exec") for why, code in SNIPPETS[name] if not why]
    for why, code in SNIPPETS[name]:
        compile(code, name, "exec")
        assert not why or why.startswith("not run: "), why
    names = {}
    for part in parts:
        exec(part, names)


def test_the_pages_that_a_newcomer_reads_are_run():
    first = ("README.md", "docs/index.md", "docs/recipes.md", "docs/limits.md")
    for name in first:
        assert any(not why for why, _ in SNIPPETS[name]), name


def on_a_cpu(name):
    """The first snippet of a page, which needs a GPU or more, without its GPU."""
    why, code = SNIPPETS[name][0]
    assert why
    return code.replace('device="cuda"', 'device="cpu"').replace(', device_map="cuda"', "")


def test_the_snippet_of_checkpoints_runs_on_a_cpu(tmp_path):
    experts = {
        f"model.layers.3.mlp.experts.{e}.{name}.weight": torch.randn(shape).bfloat16()
        for e in range(8)
        for name, shape in (
            ("gate_proj", (64, 128)),
            ("up_proj", (64, 128)),
            ("down_proj", (128, 64)),
        )
    }
    save_file(experts, tmp_path / "model.safetensors")
    config = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
              "hidden_act": "silu", "hidden_size": 128, "moe_intermediate_size": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {"folder": tmp_path}
    exec(on_a_cpu("docs/checkpoints.md"), names)
    x, routed = torch.randn(2, 128).bfloat16(), mm.route(torch.randn(2, 8), mm.Router(8, 2))
    assert names["layer"](x, *routed).shape == x.shape


def test_the_snippet_of_transformers_runs_on_a_cpu(tmp_path):
    tf = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
    }  # fmt: skip
    config = tf.Qwen3MoeConfig(
        **sizes, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    )
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    names = {"name": str(tmp_path), "AutoModelForCausalLM": tf.AutoModelForCausalLM}
    exec(on_a_cpu("docs/transformers.md"), names)
    with torch.no_grad():
        logits = names["model"](torch.tensor([[1, 2, 3]])).logits
    assert logits.isfinite().all()


def test_the_snippet_of_expert_parallel_runs_on_a_cpu(tmp_path):
    """As one rank, in a process of its own."""
    before = """
import torch, megamoe as mm
w = mm.ExpertWeights.quantize(
    torch.randn(256, 64, 32).bfloat16(), torch.randn(256, 32, 32).bfloat16(), "w4a8"
)
x = torch.randn(4, 32).bfloat16()
topk_idx, topk_weights = mm.route(torch.randn(4, 256), mm.Router(256, 6))
"""
    after = "\nassert y.shape == x.shape\ndist.destroy_process_group()\n"
    (tmp_path / "one.py").write_text(before + on_a_cpu("docs/expert-parallel.md") + after)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, tmp_path / "one.py"], env=os.environ | env, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_pictures_are_those_of_their_records(tmp_path):
    """Drawn again they have the same pixels, but for what another matplotlib draws by a hair."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    from megamoe.bench import headline, overlap_picture

    records = ROOT / "benchmarks" / "h200"
    for name, draw in (
        ("headline", lambda to: headline.draw(headline.Record.load(records / "headline.json"), to)),
        ("overlap", lambda to: overlap_picture.draw(
            overlap_picture.load(records / "overlap.json"), to)),
    ):  # fmt: skip
        draw(tmp_path / f"{name}.png")
        now, there = imread(tmp_path / f"{name}.png"), imread(ROOT / f"docs/pictures/{name}.png")
        assert now.shape == there.shape and abs(now - there).mean() < 0.01, name


def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "api.html").is_file() and (tmp_path / "pictures/headline.png").is_file()


def test_the_reference_has_every_public_name():
    grouped = [name for names in api_docs.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(mm.__all__)
    titles = re.findall(r"^### `mm\.(\w+)`$", api_docs.PAGE.read_text(), re.MULTILINE)
    assert sorted(titles) == sorted(mm.__all__)


def test_the_reference_is_that_of_the_docstrings():
    assert api_docs.PAGE.read_text() == api_docs.page(), "run python scripts/api_docs.py"


def test_the_reference_has_what_functions_return():
    text = api_docs.PAGE.read_text()
    for name, module in api_docs.VALUES.items():
        assert f"### `megamoe.{module}.{name}`" in text
    part = text.partition("### `mm.simulate`")[2].partition("\n##")[0]
    assert "Returns `Prediction`." in part
    assert "| `launches` | `tuple[Launch, ...]` |" in text  # of a plan


def test_every_argument_is_described():
    assert api_docs.missing() == []


def test_a_text_that_ends_too_early_counts_as_missing():
    for text in ("", "staged: the experts; chain:", "one, two,", "the sum of", "(up to 8"):
        assert api_docs.is_cut(text), text
    assert not api_docs.is_cut("the sum (of all ranks)")


def test_no_common_text_stands_for_a_name_with_several_meanings():
    def said(thing):
        return api_docs.texts(thing)[1]

    assert "one rank's" in said(mm.ExpertWeights.empty)["num_experts"]
    assert "of the layer" in said(mm.MoE.empty)["num_experts"]
    assert "chain" in said(mm.Plan)["mode"] and "chain" in said(mm.MoE)["mode"]
    assert said(mm.Plan)["passes"].endswith("alone")
    assert "| `**options` | `Any` | none |" in api_docs.PAGE.read_text()
    assert not re.search(r"\b[A-F]0\d{2}\b", api_docs.PAGE.read_text())


def test_the_install_page_has_the_tested_versions():
    text = (ROOT / "docs" / "install.md").read_text()
    for its_torch, triton in TRITON_OF_TORCH.items():
        assert f"| {its_torch} | {triton} |" in text
    for one in TESTED:
        assert f"torch {one.torch} with Triton {one.triton}" in text
        assert one.gpu in text and one.driver in text and one.python in text


def test_exit_codes_are_documented():
    from megamoe.cli import main

    text = (ROOT / "docs" / "limits.md").read_text()
    for code in (0, 1, 2, 3, *main.CODES):
        assert f"\n| {code} | " in text
