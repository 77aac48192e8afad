"""What a server's first calls cost once its weights are there: seconds, and memory beside them.

    python scripts/first_call.py                           # 32 experts of DeepSeek-V4-Flash
    python scripts/first_call.py --recipe w8a8 --tokens 1,64,512

Kernels are compiled before, in processes of their own. Then a process that has compiled nothing
makes a layer, and the first call of each size is timed. Exits with 1 if one takes 0.5 s, if layer
and weights take more than 1.02 of the weights' bytes, or packing more than two experts beside them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

import megamoe as mm
from megamoe.bench.provenance import provenance

BAR_S, BAR_BYTES, BAR_EXPERTS = 0.5, 1.02, 2.0
SIZES = "1,2,3,5,8,16,24,32,48,64,96,128,200,256,300,512,700,1024,2048,4096,8192"


def made(args: argparse.Namespace) -> mm.ExpertWeights:
    """The weights, as a loader leaves them on the GPU; nothing else stays."""
    rng = torch.Generator(device="cuda").manual_seed(0)
    shapes = (2 * args.intermediate, args.hidden), (args.hidden, args.intermediate)
    floats = (torch.randn(args.experts, *s, generator=rng, device="cuda") / 64 for s in shapes)
    w13, w2 = (t.bfloat16() for t in floats)
    return mm.ExpertWeights.quantize(w13, w2, args.recipe)


def layer_of(w: mm.ExpertWeights, args: argparse.Namespace) -> mm.MoE:
    return mm.MoE(w, args.experts, args.top_k, clamp=10.0)


def serve(args: argparse.Namespace, sizes: list[int]) -> int:
    """The process whose first calls are timed."""
    w = made(args)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    weights, before = w.nbytes, torch.cuda.memory_allocated()
    inputs = []
    for num in sizes:
        x = torch.randn(num, args.hidden, device="cuda").bfloat16()
        idx = torch.rand(num, args.experts, device="cuda").topk(args.top_k).indices
        inputs.append((x, idx, torch.full((num, args.top_k), 0.1, device="cuda")))
    torch.cuda.synchronize()
    beside = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    layer = layer_of(w, args)
    del w
    torch.cuda.synchronize()
    built = time.perf_counter() - start
    held = torch.cuda.memory_allocated() - before - beside + weights
    peak = torch.cuda.max_memory_allocated() - before - beside
    took = []
    for one in inputs:
        start = time.perf_counter()
        layer(*one)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    layer.check()
    experts = peak / (weights / args.experts)
    print(provenance(torch.device("cuda")))
    print(
        f"{args.recipe}, {args.experts} experts {args.hidden} x {args.intermediate}: layer built "
        f"in {built:.2f} s; it holds {held / 1e6:.1f} MB for {weights / 1e6:.1f} MB of weights "
        f"({held / weights:.3f}), and {experts:.2f} experts more while it was packed"
    )
    slowest = max(took)
    print(
        f"first calls of {len(sizes)} sizes, 1 to {max(sizes)} tokens: at most {slowest:.3f} s, "
        f"that of {sizes[took.index(slowest)]} tokens; all in {sum(took):.2f} s"
    )
    is_met = slowest < BAR_S and held <= BAR_BYTES * weights and experts <= BAR_EXPERTS
    return int(not is_met)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"experts": 32, "hidden": 4096, "intermediate": 2048, "top-k": 6}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", default="w4a8_block")
    parser.add_argument("--tokens", default=SIZES)
    parser.add_argument("--serve", action="store_true", help="only the process that is timed")
    args = parser.parse_args()
    numbers = [int(n) for n in args.tokens.split(",")]
    if args.serve:
        return serve(args, numbers)
    layer = layer_of(made(args), args)
    start = time.perf_counter()
    mm.warmup(layer, numbers)
    print(f"compiled and warm after {time.perf_counter() - start:.1f} s", flush=True)
    del layer
    torch.cuda.empty_cache()
    return subprocess.call([sys.executable, *sys.argv, "--serve"])


if __name__ == "__main__":
    sys.exit(main())
