"""How fast `layer.refresh` writes quantised experts, beside a copy of as many bytes, on a GPU.

    python scripts/refresh_speed.py                        # 32 experts of DeepSeek-V4-Flash
    python scripts/refresh_speed.py --recipe w4a16 --floats

A graph that was captured before must give the new bits at the old addresses; exits with 1 if not.
Two ratios are said: to a copy of the quantised bytes, and of all bytes that go in and out, a
second, to those of that copy. From BF16 the first cannot reach 0.5: the source is twice (w8a8) to
four times as large as what a copy reads, and is read twice, to refuse before anything is written.
What the GPU does is timed apart, by events, while the host queues it all after a slow kernel.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch

import megamoe as mm
from megamoe.bench.provenance import provenance
from megamoe.engine.refresh_on_gpu import OnGpu

COPIES = 10  # in a row: the host's part is not a copy's
CYCLES = 20_000_000  # of a GPU that is kept busy, about 10 ms: the host queues all of it meanwhile


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Median of calls that the host waits for: a refresh looks at the device itself."""
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])  # the first one compiles


def of_gpu(
    weights: mm.ExpertWeights, given: tuple[object, object], rounds: int
) -> tuple[float, float, float]:
    """Medians: seconds of the GPU that looks and that writes, and of the host that queues both."""
    found = []
    for _ in range(rounds + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        start = time.perf_counter()
        one = OnGpu.of(
            range(weights.num_experts), given, (weights.w13, weights.w2), (None, None),  # type: ignore[arg-type]
            is_interleaved=False,
        )  # fmt: skip
        if one is None:
            raise SystemExit("kernels do not refresh these experts")
        events[0].record()
        one.look()
        events[1].record()
        one.write()
        events[2].record()
        host = time.perf_counter() - start
        one.keep(one.read())  # waits
        looked, wrote = (a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))
        found.append((looked, wrote, host))
    looked, wrote, host = (statistics.median(one) for one in zip(*found[1:], strict=True))
    return looked, wrote, host


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"experts": 32, "hidden": 4096, "intermediate": 2048, "rounds": 20}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", default="w4a8_block")
    parser.add_argument("--floats", action="store_true", help="from BF16: quantised on the way")
    args = parser.parse_args()
    rng = torch.Generator(device="cuda").manual_seed(0)

    def some() -> tuple[torch.Tensor, torch.Tensor]:
        shapes = (2 * args.intermediate, args.hidden), (args.hidden, args.intermediate)
        made = (torch.randn(args.experts, *s, generator=rng, device="cuda") for s in shapes)
        return tuple((t / t.shape[2] ** 0.5).bfloat16() for t in made)  # type: ignore[return-value]

    layer = mm.MoE(mm.ExpertWeights.quantize(*some(), args.recipe), args.experts, 6)
    x = torch.randn(64, args.hidden, generator=rng, device="cuda").bfloat16()
    idx = torch.rand(64, args.experts, generator=rng, device="cuda").topk(6).indices
    gates = torch.full((64, 6), 1 / 6, device="cuda")
    layer(x, idx, gates)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, idx, gates)
    floats = some()
    new = mm.ExpertWeights.quantize(*floats, args.recipe)
    held = [t.data_ptr() for t in layer.experts.buffers()]
    given = floats if args.floats else (new.w13, new.w2)
    took = seconds(lambda: layer.refresh(*given), args.rounds)
    looked, wrote, host = of_gpu(layer.weights, given, args.rounds)
    source = torch.empty(new.nbytes, dtype=torch.uint8, device="cuda")
    into = torch.empty_like(source)
    copied = seconds(lambda: [into.copy_(source) for _ in range(COPIES)], args.rounds) / COPIES
    graph.replay()
    is_same = torch.equal(y, mm.MoE(new, args.experts, 6)(x, idx, gates))
    is_there = held == [t.data_ptr() for t in layer.experts.buffers()]
    moved = new.nbytes + (sum(t.nbytes for t in floats) if args.floats else new.nbytes)
    bandwidth, of_copy = moved / took, 2 * new.nbytes / copied
    print(provenance(torch.device("cuda")))
    print(
        f"{args.recipe}, {args.experts} experts {args.hidden} x {args.intermediate}, "
        f"{new.nbytes / 1e6:.0f} MB: refreshed from {'BF16' if args.floats else 'its format'} in "
        f"{took * 1e6:.0f} us, copied in {copied * 1e6:.0f} us: {copied / took:.2f} of a copy's "
        f"bandwidth; {moved / 1e6:.0f} MB in and out are {bandwidth / 1e12:.2f} TB/s, "
        f"{bandwidth / of_copy:.2f} of the copy's"
    )
    print(
        f"of which the GPU looks for {looked * 1e6:.0f} us and writes for {wrote * 1e6:.0f} us; "
        f"the host queues both in {host * 1e6:.0f} us"
    )
    print(f"the graph has the new bits: {is_same}; addresses unchanged: {is_there}")
    return int(not (is_same and is_there))


if __name__ == "__main__":
    sys.exit(main())
