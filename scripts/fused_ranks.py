"""A fused call of 8 ranks of one GPU, 8 tokens each, beside one rank that has all 64 tokens.

    python scripts/fused_ranks.py                      # DeepSeek-V4-Flash, 256 and 32 experts

Graph replays, shuffled; what the exchange between ranks costs is the ratio. Ranks of one GPU copy
their inputs one after the other, those of several each its own: the launch is timed without that
too, and the ratio is of it. Exits with 1 if the bits differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

import megamoe as mm
from megamoe.bench.provenance import provenance
from megamoe.bench.timer import Prepared, Timer
from megamoe.engine.local import LocalRanks
from megamoe.engine.symm_buffer import SymmBuffer

RANKS, EACH, TOP_K = 8, 8, 6


@contextmanager
def _without_put() -> Iterator[None]:
    """Calls that leave the buffers' inputs as they are."""
    put, SymmBuffer.put = SymmBuffer.put, lambda *args: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        SymmBuffer.put = put  # type: ignore[method-assign]


def measure(recipe: str, experts: int, hidden: int, intermediate: int) -> bool:
    """Print one line; -> whether the bits are those of one rank."""
    rng = torch.Generator(device="cuda").manual_seed(0)
    shapes = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
    floats = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
    for t in floats:
        t.normal_(generator=rng).div_(t.shape[2] ** 0.5)
    w = mm.ExpertWeights.quantize(*floats, recipe)
    del floats
    num = RANKS * EACH
    x = torch.randn(num, hidden, generator=rng, device="cuda").bfloat16()
    idx = torch.rand(num, experts, generator=rng, device="cuda").topk(TOP_K).indices
    gates = torch.rand(num, TOP_K, generator=rng, device="cuda")
    inputs = x, idx, gates
    ranks, one = LocalRanks(w, RANKS), mm.MoE(w, experts, TOP_K, mode="fused", backend="hopper")
    parts = [list(t.split(EACH)) for t in inputs]
    calls = {
        "ranks": lambda: ranks(*parts),
        "launch": lambda: ranks(*parts),  # inputs lie in the buffers already
        "one": lambda: one(*inputs),
    }
    graphs, outputs = {}, {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with _without_put() if name == "launch" else nullcontext(), torch.cuda.graph(graphs[name]):
            outputs[name] = call()
        graphs[name].replay()
    torch.cuda.synchronize()
    is_same = all(torch.equal(torch.cat(outputs[n]), outputs["one"]) for n in ("ranks", "launch"))

    def replay(name: str) -> Prepared:
        def run() -> torch.Tensor:
            graphs[name].replay()
            return x  # no output is to be poisoned

        return Prepared(run, "graph")

    timer = Timer(torch.device("cuda"), repeats=40, rounds=3)
    times = timer.time({name: replay(name) for name in graphs})
    ranks.check()
    one.check()
    us = {name: times[name].us for name in graphs}
    print(
        f"{recipe}, {experts} experts {hidden} x {intermediate}: {RANKS} ranks of {EACH} tokens "
        f"{us['launch']:.1f} us ({us['ranks']:.1f} with {RANKS} copies of inputs, 1 a rank), "
        f"one rank of {num} tokens {us['one']:.1f} us: {us['launch'] / us['one']:.3f}; "
        f"same bits: {is_same}",
        flush=True,
    )
    return is_same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", default="w4a8_block,w8a8")
    args = parser.parse_args()
    print(provenance(torch.device("cuda")))
    cases = [(r, e) for r in args.recipes.split(",") for e in (256, 32)]
    made = [measure(recipe, experts, 4096, 2048) for recipe, experts in cases]
    return int(not all(made))


if __name__ == "__main__":
    sys.exit(main())
