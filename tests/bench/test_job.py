"""The main job: correct for every recipe, and not correct when something is off."""

from dataclasses import replace

import pytest
import torch

from megamoe.bench import job
from megamoe.bench.workloads import MODELS, model_named
from megamoe.errors import MegaMoEError
from megamoe.problem import RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_job_is_correct_for_every_recipe(recipe, num_ranks):
    steps = []
    result = job.run(
        MODELS["tiny"], recipe=recipe, num_tokens=24, num_ranks=num_ranks,
        progress=lambda *step: steps.append(step),
    )  # fmt: skip
    assert result.ok and result.reference_error == 0.0 and result.scale == 1.0
    assert steps[0] == ("weights", 1, 8) and {s for s, *_ in steps} >= {"layer", "check", "bf16"}
    assert result.as_dict()["ok"] is True


@pytest.mark.parametrize("name", MODELS)
def test_every_preset_runs_scaled(name):
    result = job.run(MODELS[name], num_tokens=4, scale=0.02)
    assert result.ok, result
    assert result.problem.num_experts == MODELS[name].num_experts
    assert result.recipe == MODELS[name].recipe


def test_a_wrong_layer_is_called_wrong(monkeypatch):
    good = job.run(MODELS["tiny"], num_tokens=8)
    assert good.ok
    assert not replace(good, error=0.6).ok
    assert not replace(good, reference_error=1e-4).ok
    assert not replace(good, counts_ok=False).ok
    real = job.moe
    monkeypatch.setattr(job, "moe", lambda *a, **k: real(*a, **k) * torch.tensor(1.01).bfloat16())
    assert not job.run(MODELS["tiny"], num_tokens=8).ok


def test_scaling_keeps_the_routing_and_legal_widths():
    for model in MODELS.values():
        for scale in (*job.SCALES, 0.013):
            small = model.scaled(scale)
            assert small.router == model.router
            assert small.hidden % 32 == 0 and small.intermediate % 32 == 0
    assert model_named("gpt-oss-120b").scaled(0.5).hidden % 128 != 0  # short last blocks stay


def test_auto_scale_fits_the_cpu_budget():
    for model in MODELS.values():
        scale = job.fitting_scale(model, torch.device("cpu"))
        assert model.scaled(scale).bf16_bytes <= job.CPU_BUDGET


def test_several_ranks_run_on_the_reference():
    with pytest.raises(MegaMoEError, match=r"needs a GPU|reference"):
        job.run(MODELS["tiny"], num_tokens=4, num_ranks=2, backend="portable")


@pytest.mark.parametrize(
    "change",
    [{"num_tokens": 0}, {"num_ranks": 3}, {"scale": 2.0}, {"recipe": "w1"}, {"backend": "x"}],
    ids=str,
)
def test_bad_jobs_are_refused(change):
    with pytest.raises(MegaMoEError, match="got"):
        job.run(MODELS["tiny"], **{"num_tokens": 4, **change})
