"""Two trees of megamoe on one GPU, cell by cell: bits and times, calls interleaved.

    python3 scripts/ab.py --old FOLDER [--new FOLDER] [--cells flash-ep8/8,...] [--out FILE]

Each tree has a process of its own that makes the same layer and inputs and captures one call in a
CUDA graph. The processes take turns, one replay each, 512 MB written before it, so that clocks and
power are those of both. Only the public API is used, so any two commits can be compared.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

# name: hidden, intermediate, experts of a rank, top_k
SHAPES = {
    "flash-ep8": (4096, 2048, 32, 6),
    "pro-ep8": (7168, 3072, 48, 6),
    "v3-ep8": (7168, 2048, 32, 8),
}
TOKENS = 8, 64, 512, 2048, 8192
CELLS = [f"{shape}/{n}" for shape in SHAPES for n in TOKENS]
ROUNDS, REPEATS = 3, 15


class Worker:
    """One tree: makes cells and times single replays."""

    def __init__(self, recipe):
        import torch

        self.torch, self.recipe, self.weights, self.shape = torch, recipe, None, ""
        self.flush = torch.zeros(512 << 18, dtype=torch.int32, device="cuda")

    def make(self, cell):
        """Build the layer and capture a call; -> what ran, and a digest of its bits."""
        import megamoe as mm

        torch = self.torch
        name, _, tokens = cell.partition("/")
        hidden, intermediate, experts, top_k = SHAPES[name]
        rng = torch.Generator("cuda").manual_seed(7)
        if name != self.shape:
            self.weights = self.layer = self.graph = None
            w13 = torch.empty(experts, 2 * intermediate, hidden, dtype=torch.bfloat16).cuda()
            w2 = torch.empty(experts, hidden, intermediate, dtype=torch.bfloat16).cuda()
            w13.normal_(generator=rng).div_(hidden**0.5)
            w2.normal_(generator=rng).div_(intermediate**0.5)
            self.weights = mm.ExpertWeights.quantize(w13, w2, recipe=self.recipe)
            self.shape = name
            del w13, w2
        num = int(tokens)
        rng.manual_seed(num)
        x = torch.randn(num, hidden, generator=rng, device="cuda").bfloat16()
        chance = torch.rand(num, experts, generator=rng, device="cuda")
        idx = chance.topk(top_k).indices
        gates = torch.rand(num, top_k, generator=rng, device="cuda")
        layer = mm.MoE(
            self.weights, experts, top_k, max_tokens_per_rank=num, backend="hopper", clamp=10.0
        )
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layer(x, idx, gates)
        torch.cuda.synchronize()
        self.layer, self.inputs = layer, (x, idx, gates)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            y = layer(x, idx, gates)
        self.graph.replay()
        torch.cuda.synchronize()
        bits = y.view(torch.int16).cpu().numpy().tobytes()
        return hashlib.sha256(bits).hexdigest()[:16]

    def time(self, times):
        """Microseconds of single replays."""
        torch, found = self.torch, []
        for _ in range(int(times)):
            self.flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(1e3 * begin.elapsed_time(end))
        return found


def serve(recipe):
    """Answer lines of JSON, [method, argument], on standard output."""
    out, sys.stdout = sys.stdout, sys.stderr
    worker = Worker(recipe)
    for line in sys.stdin:
        method, argument = json.loads(line)
        try:
            answer = getattr(worker, method)(argument)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


class Tree:
    """The other end of a worker."""

    def __init__(self, folder, recipe):
        env = dict(os.environ, PYTHONPATH=str(Path(folder).resolve()))
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--recipe", recipe],
            env=env, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, method, argument):
        self.process.stdin.write(json.dumps([method, argument]) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self.process.wait()}")
        return json.loads(line)


def compare(trees, cell):
    """One cell of both trees: bits, medians, and the ratio of new to old."""
    for tree in trees.values():  # both at once: mostly compilers
        tree.ask("make", cell)
    made = {name: tree.answer() for name, tree in trees.items()}
    bad = {name: m["error"] for name, m in made.items() if isinstance(m, dict)}
    if bad:
        return {"cell": cell, "error": bad}
    times, rng = {name: [] for name in trees}, random.Random(0)
    for _ in range(ROUNDS):
        order = [name for name in trees for _ in range(REPEATS)]
        rng.shuffle(order)
        for name in order:
            trees[name].ask("time", 1)
            times[name] += trees[name].answer()
    medians = {name: statistics.median(t[3:]) for name, t in times.items()}
    return {
        "cell": cell, "same_bits": made["old"] == made["new"],
        **{f"{name}_us": round(us, 2) for name, us in medians.items()},
        "ratio": round(medians["new"] / medians["old"], 4),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old")
    parser.add_argument("--new", default=str(Path(__file__).parent.parent))
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--recipe", default="w4a8_block")
    parser.add_argument("--out")
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    if given.serve:
        return serve(given.recipe)
    trees = {name: Tree(getattr(given, name), given.recipe) for name in ("old", "new")}
    rows = []
    for cell in given.cells.split(","):
        rows.append(compare(trees, cell))
        print(json.dumps(rows[-1]), flush=True)
        if given.out:
            Path(given.out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for tree in trees.values():
        tree.process.stdin.close()


if __name__ == "__main__":
    main()
