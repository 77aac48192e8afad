"""Words that the code had for things that the field has words for; none of them comes back."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# before -> now, of whole names
GONE = {
    "crew": "state", "manner": "launch options", "greet": "signal", "mail": "replay arguments",
    "mailbox": "replay queue", "deal": "assignment", "hand": "work items", "firsts": "row_begin",
    "looks": "signature", "across": "num_n_tiles", "Held": "ExpertModule", "Calc": "Compute",
    "Faults": "DeviceStatus", "rooms": "symmetric buffers", "SECONDS": "L2_DONE",
    "EARLY": "PREFETCH_STEPS", "straight": "plain", "swapped": "swap_ab", "draw_tile": "dynamic",
    "told": "report", "num_told": "num_reported", "room": "stage", "meeting": "rendezvous",
    "meet": "gather", "SECOND": "L2",
}  # fmt: skip
# Words that no name of the package has, alone or as a part: of a name that says what a value is
# they say nothing, or something private.
BANNED = {
    "aside", "around", "beside", "crew", "deal", "deals", "dealt", "draw", "drawn", "draws",
    "edges", "firsts", "following", "found", "given", "greet", "greets", "held", "hold", "holds",
    "home", "kept", "lend", "lent", "letter", "letters", "letting", "looks", "made", "mail",
    "mailbox", "manner", "meet", "meeting", "most", "notes", "pictured", "picked", "room", "rooms",
    "seal", "seen", "spare", "stretches", "told", "turn",
}  # fmt: skip
# Where a word is the field's: pictures and samples are drawn, a router keeps groups of experts.
MEANT = {
    "draw": {
        "bench/headline.py", "bench/overlap_picture.py", "bench/plots.py", "bench/spans.py",
        "certify/layers.py", "routing/samplers.py", "simulator/sample.py",
    },
    "draws": {"simulator/sample.py"},
    "kept": {"routing/router.py", "routing/spec.py"},
    "seen": {"errors.py"},  # MegaMoETimeout: what was `expected` and `seen`
}  # fmt: skip
# Names that are still to be renamed. Only shrinks: a file whose names are right is taken out.
LEFT: dict[str, set[str]] = {
    "around": {
        "engine/recording.py", "engine/status.py", "integrations/sglang.py",
        "planner/copies.py",
    },
    "aside": {"engine/packed.py"},
    "beside": {
        "cli/overlap.py", "engine/expert_module.py", "engine/model_config.py",
        "planner/hopper.py", "planner/smem.py", "trace/beside.py",
    },
    "drawn": {"trace/beside.py"},
    "edges": {"planner/blackwell.py"},
    "following": {"planner/chain.py", "simulator/events.py"},
    "found": {"engine/certified.py", "engine/precompile.py"},
    "given": {"engine/refresh.py", "engine/status.py"},
    "held": {
        "bench/contestants.py", "certify/checks.py", "cli/certify.py",
        "compat/deep_gemm/handle.py", "engine/aliases.py", "engine/expert_module.py",
        "engine/loader.py", "engine/packed.py", "engine/packing.py", "engine/refresh.py",
        "engine/refresh_on_gpu.py", "engine/weights.py", "integrations/taken.py",
        "integrations/transformers.py", "integrations/vllm/layers.py", "simulator/constants.py",
    },
    "hold": {"engine/images.py"},
    "holds": {"engine/fingerprint.py", "integrations/transformers_gate.py"},
    "home": {
        "__init__.py", "planner/chain.py", "planner/memory.py", "simulator/chain.py",
        "simulator/events.py", "simulator/schedule.py", "simulator/simulate.py",
        "simulator/staged.py",
    },
    "lend": {"engine/packed.py"},
    "lent": {"engine/packed.py", "integrations/taken.py"},
    "letter": {"trace/kinds.py", "trace/text.py"},
    "letters": {"trace/text.py"},
    "letting": {"engine/expert_module.py"},
    "made": {"bench/calls.py", "engine/loader.py"},
    "most": {
        "bench/headline.py", "compat/deep_gemm/run.py", "engine/bounds.py", "engine/graphs.py",
        "engine/group_calls.py", "engine/layer.py", "engine/row_counts.py",
        "integrations/vllm/exchange.py", "layout/pushed.py", "planner/tables/blackwell.py",
        "planner/tables/split.py",
    },
    "notes": {"bench/job.py", "trace/perfetto.py"},
    "picked": {
        "bench/sweep.py", "engine/group_calls.py", "engine/group_graphs.py", "engine/loader.py",
        "engine/stored.py", "engine/weights.py", "formats/quantized.py", "planner/hopper.py",
    },
    "pictured": {"engine/packed.py"},
    "seal": {
        "compat/deep_gemm/prepared.py", "compat/deep_gemm/shared.py", "engine/derived.py",
        "engine/fingerprint.py", "engine/images.py", "engine/packed.py",
        "integrations/transformers.py",
    },
    "seen": {"engine/status.py"},
    "spare": {
        "balance/statistics.py", "compat/deep_gemm/utils/math.py", "distributed/wire.py",
        "engine/packed.py", "engine/packing.py", "formats/quantize.py", "formats/quantized.py",
        "integrations/transformers.py", "kernels/hopper/weights/pack.py",
    },
}  # fmt: skip
FILES = [
    path
    for folder in ("megamoe", "tests", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "studies" not in path.parts
]
PACKAGE = [path for path in FILES if ROOT / "megamoe" in path.parents]
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def names(path):
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def words(name):
    """The words of a name, split at underscores and where camel case begins one."""
    return {word.lower() for word in PART.findall(name)}


def banned_in(path):
    return {word for name in names(path) for word in words(name)} & BANNED


def place(path):
    return str(path.relative_to(ROOT / "megamoe"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_are_the_fields(path):
    assert not {name for name in names(path) if name.strip("_") in GONE}


@pytest.mark.parametrize("path", PACKAGE, ids=place)
def test_no_name_has_a_banned_word(path):
    excused = {w for known in (MEANT, LEFT) for w, files in known.items() if place(path) in files}
    assert not banned_in(path) - excused


def test_what_is_left_to_rename_only_shrinks():
    """An entry whose file no longer has the word is to be deleted."""
    hits = {(word, place(path)) for path in PACKAGE for word in banned_in(path)}
    listed = {(word, file) for known in (MEANT, LEFT) for word, files in known.items()
              for file in files}  # fmt: skip
    assert not listed - hits


def test_names_are_split_into_words():
    assert words("_WAIT_DrawnTile2x") == {"wait", "drawn", "tile", "x"}
    assert (
        words("is_drawn") & BANNED and words("HELD_BITS") & BANNED and not words("holder") & BANNED
    )
