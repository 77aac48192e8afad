"""What compiled models call as it stands costs processes that compile nothing no import."""

import subprocess
import sys

import torch

import megamoe as mm
from megamoe.engine.eager import eager
from megamoe.formats.quantize import quantize
from tests.engine.pretended import tokens, weights

FIRST_LAYER = """
import sys
import torch
import megamoe as mm
w = mm.ExpertWeights.quantize(torch.randn(2, 128, 96), torch.randn(2, 96, 64), "w4a8")
layer = mm.MoE(w, 2, 1)
inputs = torch.randn(3, 96).bfloat16(), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
layer(*inputs)
mm.moe(*inputs, w)
sys.exit("torch._dynamo" in sys.modules)
"""


def test_a_first_layer_does_not_import_the_compiler():
    subprocess.run([sys.executable, "-c", FIRST_LAYER], check=True)


def test_quantised_tokens_pass_compiled_graphs_by():
    x, idx, gates = tokens()
    q, w, graphs = quantize(x, "mxfp8"), weights(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def model(gates):
        return mm.moe(q, idx, gates * 1, w) + 1

    torch._dynamo.reset()
    assert torch.equal(model(gates), mm.moe(q, idx, gates, w) + 1)
    ops = [node.target for graph in graphs for node in graph.graph.nodes if node.op != "output"]
    assert len(graphs) == 2 and len(ops) <= 5, ops  # what is before, and what is after


def test_a_function_that_is_eager_is_not_traced_into():
    seen = []

    @eager("its caller counts calls")
    def count(x):
        seen.append(torch.compiler.is_compiling())
        return x

    model = torch.compile(lambda x: count(x * 2) + 1, backend="eager")
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 3.0)) and seen == [False]
