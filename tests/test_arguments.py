"""Arguments of another type than a call takes end in an error of ours, which says what it takes."""

import pytest
import torch

import megamoe as mm
from megamoe.integrations import transformers as hugging_face

SIZES = 512, 256, 8, 2  # hidden, intermediate, num_experts, top_k
WEIGHTS = mm.ExpertWeights.quantize(
    torch.randn(8, 512, 512).bfloat16(), torch.randn(8, 512, 256).bfloat16(), recipe="w8a8"
)
CALL = torch.randn(2, 512).bfloat16(), *mm.route(torch.randn(2, 8), mm.Router(8, 2))
PROBLEM = mm.Problem(8, *SIZES)

WRONG = [
    (lambda: mm.plan("deepseek-v3", "h200"), "a plan is of a Problem"),
    (lambda: mm.plan(PROBLEM, None), "on a Hardware or the name of one"),
    (lambda: mm.simulate(PROBLEM), "make a plan first"),
    (lambda: mm.Options(clamp="10"), "clamp must be a number, or None; got '10'"),
    (lambda: mm.Options(clamp=True), "clamp must be a number"),
    (lambda: mm.Options(fast_math="yes"), "fast_math must be True or False; got 'yes'"),
    (lambda: mm.moe(*CALL, WEIGHTS, clamp="10"), "clamp must be a number"),
    (lambda: mm.moe(*CALL, WEIGHTS, overrides=[1]), "overrides must map names to values"),
    (lambda: mm.MoE(WEIGHTS, 8, "2"), "top_k must be an integer; got '2'"),
    (lambda: mm.Router(8, "2"), "top_k must be an integer"),
    (lambda: mm.Problem(8.5, *SIZES), "num_tokens must be an integer; got 8.5"),
    (lambda: mm.Problem(8, 512.0, 256, 8, 2), "hidden must be an integer"),
    (lambda: mm.Problem(8, *SIZES, num_ranks=True), "num_ranks must be an integer"),
    (lambda: mm.warmup(mm.MoE(WEIGHTS, 8, 2), 4), r"token counts must be a sequence.*such as \[8"),
    (lambda: mm.Checkpoint(123), "a checkpoint is a folder, by its path; got 123"),
    (lambda: hugging_face.use("model"), "use takes a model that is in memory; got 'model'"),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_another_type_is_refused_by_name(call, words):
    with pytest.raises(mm.DTypeError, match=words):
        call()


@pytest.mark.parametrize("name", ["", " "])
def test_an_implementation_has_a_name(name):
    with pytest.raises(mm.RangeError, match="the name must be a word"):
        hugging_face.register(name)
