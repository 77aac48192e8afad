"""The recipe that every command and the loader take by default is the one that pages name."""

import json
import re
from pathlib import Path

import pytest

from megamoe.bench.workloads import MODELS
from megamoe.cli import compile as compile_command
from megamoe.hardware import CPU, MACHINES

ROOT = Path(__file__).parents[2]
# What pages call the presets.
NAMES = {
    "deepseek-v4-flash": "DeepSeek-V4-Flash",
    "deepseek-v4-pro": "-Pro",
    "deepseek-v3": "DeepSeek-V3",
    "kimi-k2": "Kimi-K2",
    "gpt-oss-120b": "gpt-oss",
    "qwen3-235b": "Qwen3-MoE",
}


def rows(page, num_before):
    """(names of checkpoints, recipe on Hopper, recipe elsewhere) of a page's table of recipes."""
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith(("DeepSeek", "gpt-oss", "Qwen3")) and "Router" not in line:
            if len(cells) < num_before + 2 or not cells[num_before].startswith("`"):
                continue
            on_hopper, elsewhere = cells[num_before : num_before + 2]
            elsewhere = on_hopper if elsewhere == "the same" else elsewhere
            yield cells[0], *(re.match("`(.+?)`", cell)[1] for cell in (on_hopper, elsewhere))


@pytest.mark.parametrize(("page", "num_before"), [("README.md", 1), ("docs/recipes.md", 2)])
@pytest.mark.parametrize("name", NAMES)
def test_pages_name_the_recipe_that_is_taken_by_default(page, num_before, name):
    ((on_hopper, elsewhere),) = [
        (on_hopper, elsewhere)
        for checkpoint, on_hopper, elsewhere in rows(page, num_before)
        if NAMES[name] in checkpoint
    ]
    for machine in (*MACHINES.values(), CPU):
        wanted = on_hopper if machine.arch == "sm_90a" else elsewhere
        assert MODELS[name].recipe_on(machine.arch) == wanted, machine.name


def test_commands_take_the_default_of_their_machine(megamoe):
    def recipe(*args):
        return json.loads(megamoe(*args, "--json")[1])["problem"]["recipe"]

    flash = ("plan", "deepseek-v4-flash", "--tokens", "8")
    assert recipe(*flash) == "w4a8_block" and recipe(*flash, "--hardware", "b200") == "w4a8"
    assert recipe(*flash, "--recipe", "w4a8") == "w4a8"
    for gpu, wanted in (("h200", "w4a8_block"), ("b200", "w4a8")):
        spec = compile_command.layer_spec(
            MODELS["deepseek-v4-flash"], MACHINES[gpu], recipe=None, ranks=1, experts=None,
            mode="auto", graphs=True, shared=False, max_tokens=8,
        )  # fmt: skip
        assert spec.recipe == wanted


def test_every_preset_of_a_model_is_held_to_the_pages():
    assert set(MODELS) == {*NAMES, "tiny"}
