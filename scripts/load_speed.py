"""How fast and in how much memory a layer's experts come out of a checkpoint: synthetic shards.

    python scripts/load_speed.py                       # 256 experts of DeepSeek-V4-Flash, 3.4 GB
    python scripts/load_speed.py --device cuda --cold  # onto a GPU, files not in the page cache

Exits with 1 if more than two experts lay in host memory beside the result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import megamoe as mm

LINEARS = ("gate_proj", "up_proj", "down_proj")
PREFIX = "model.layers.3.mlp.experts."


def write(folder: Path, experts: int, hidden: int, intermediate: int, shards: int) -> int:
    """MXFP4 experts as they are published; the bytes that were written."""
    rng, files, num_bytes = torch.Generator().manual_seed(0), {}, 0
    for shard in range(shards):
        file, tensors = f"model-{shard + 1:05}-of-{shards:05}.safetensors", {}
        for expert in range(shard * experts // shards, (shard + 1) * experts // shards):
            for name in LINEARS:
                rows, cols = (
                    (intermediate, hidden) if name != "down_proj" else (hidden, intermediate)
                )
                head = f"{PREFIX}{expert}.{name}.weight"
                codes = torch.randint(256, (rows, cols // 2), generator=rng, dtype=torch.uint8)
                tensors[f"{head}_packed"] = codes
                scale = torch.randint(118, 124, (rows, cols // 32), generator=rng)
                tensors[f"{head}_scale"] = scale.to(torch.uint8)
        save_file(tensors, folder / file)
        files |= dict.fromkeys(tensors, file)
        num_bytes += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", "num_experts": experts,
              "num_experts_per_tok": 8}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return num_bytes


def memory(what: str) -> int:
    """Host memory of this process in bytes: VmRSS, now, or VmHWM, the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def drop_from_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(folder: Path, num_bytes: int, device: str, recipe: str, *, is_cold: bool) -> float:
    """Load once and say how; experts in host memory beside the result."""
    found = mm.Checkpoint(folder)
    experts = found.picked(3).num_experts
    found.experts(3, rank=0, num_ranks=experts, device=device, recipe=recipe)  # what loads once
    if is_cold:
        drop_from_cache(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = memory("VmRSS"), time.perf_counter()
    w = found.experts(3, device=device, recipe=recipe)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    result = w.nbytes if device == "cpu" else 0
    beside = (memory("VmHWM") - before - result) / (num_bytes / experts)
    print(
        f"{w!r}: {num_bytes / 1e9:.2f} GB in {seconds:.2f} s, {num_bytes / seconds / 1e9:.2f} GB/s "
        f"from {'disk' if is_cold else 'the page cache'}; beside the result {beside:.2f} experts"
    )
    return beside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("experts", 256),
        ("hidden", 4096),
        ("intermediate", 2048),
        ("shards", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recipe", default="w4a8_block")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=Path, help="where shards go; they are deleted")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        at = Path(folder)
        # In a process of its own: what wrote the shards has a peak too.
        sizes = args.experts, args.hidden, args.intermediate, args.shards
        child = os.fork()
        if child == 0:
            write(at, *sizes)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            return 2
        num_bytes = sum(file.stat().st_size for file in at.glob("*.safetensors"))
        beside = load(at, num_bytes, args.device, args.recipe, is_cold=args.cold)
    return int(beside > 2)


if __name__ == "__main__":
    sys.exit(main())
