"""DeepGEMM's own MegaMoE test file, unchanged, with megamoe in the place of deep_gemm.

The file is not part of this project. It is looked for in the checkout that DEEP_GEMM_ROOT names, then
in .scratch/DeepGEMM; without it these tests are skipped. Where its baseline libraries are absent the
file runs and times the call; tests/compat/test_mega_moe.py holds the same calls to float64.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compat.ranks import TOKENS
from tests.compat.support import Case, E

ROOT = Path(__file__).parent.parent.parent
PLACES = [os.environ.get("DEEP_GEMM_ROOT"), ROOT / ".scratch" / "DeepGEMM"]
FOUND = [Path(p) / "tests" / "test_mega_moe.py" for p in PLACES if p]
FILE = next((path for path in FOUND if path.is_file()), None)
RUN = [sys.executable, str(Path(__file__).parent / "run_peer.py")]

SMALL = {"hidden": 256, "intermediate-hidden": 128, "num-experts": 8, "num-topk": 2,
         "num-max-tokens-per-rank": 24}  # fmt: skip
LARGE = {"hidden": 4096, "intermediate-hidden": 2048, "num-experts": 32, "num-topk": 6,
         "num-max-tokens-per-rank": 512}  # fmt: skip
MORE = [
    {"masked-ratio": 0.3, "num-max-removed-tokens": 9},
    {"num-tokens": 5, "fast-math": 0},
    {"mma-type": "bf16xbf16", "masked-ratio": 0.3},
]

needs_file = pytest.mark.skipif(
    FILE is None, reason="DeepGEMM's tests/test_mega_moe.py not found; set DEEP_GEMM_ROOT"
)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(*arguments, command=RUN):
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=300, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                          "MASTER_PORT": str(free_port())},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def options(sizes, more):
    return [part for key, value in (sizes | more).items() for part in (f"--{key}", value)]


@needs_file
@pytest.mark.parametrize("more", MORE, ids=str)
def test_the_file_runs_unchanged_in_one_process(more):
    said = run(FILE, "--num-processes", 1, "--local-rank-idx", 0, *options(SMALL, more))
    assert "Performance:" in said and " us, reduction:" in said


@needs_file
@pytest.mark.gpu
@pytest.mark.parametrize("more", MORE, ids=str)
def test_the_file_runs_unchanged_on_a_gpu_where_it_spawns_its_process(more):
    command = [sys.executable, "-m", "megamoe.compat.deep_gemm"]
    said = run(FILE, "--num-processes", 1, *options(LARGE, more), command=command)
    assert "Performance:" in said
    print(said)


SPAWNS = """
import deep_gemm
import torch
from deep_gemm.utils.dist import dist_print, init_dist, uneven_all_gather


def work(rank, num_ranks):
    rank, size, group = init_dist(rank, num_ranks)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = uneven_all_gather(torch.full((3 * rank, 2), rank, device=device), group=group)
    dist_print(f"rank {rank} of {size}: {tuple(rows.shape)} {deep_gemm.mega.__name__}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, args=(2,), nprocs=2)
"""


def test_spawned_processes_find_the_stand_in_too(tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    said = run(script, command=[sys.executable, "-m", "megamoe.compat.deep_gemm"])
    for rank in (0, 1):
        assert f"rank {rank} of 2: (3, 2) megamoe.compat.deep_gemm.mega" in said


def test_two_ranks_have_the_bits_of_one(tmp_path):
    script = Path(__file__).parent / "ranks.py"
    run(script, tmp_path, command=[sys.executable, "-m", "megamoe.compat.deep_gemm"])
    for mma_type in ("fp8xfp4", "bf16xbf16"):
        for name, counts in TOKENS.items():
            total = torch.zeros(E, dtype=torch.int32)
            stats = []
            for rank, count in enumerate(counts):
                y, received = torch.load(tmp_path / f"{mma_type} {name} {rank}.pt")
                case = Case(mma_type, count, seed=0, masked_ratio=0.2)
                buffer = case.buffer()
                case.fill(buffer)
                assert torch.equal(y, case.run(buffer, total, clamp=10.0)), (mma_type, name, rank)
                stats.append(received - 100)
            assert torch.equal(torch.cat(stats), total)


def test_install_gives_one_module_under_both_names():
    code = (
        "import megamoe.compat.deep_gemm as ours; ours.install(); ours.install()\n"
        "import deep_gemm, deep_gemm.utils.math, deep_gemm.testing.bench\n"
        "import megamoe.compat.deep_gemm.utils.math as plain\n"
        "from deep_gemm.testing import bench_kineto, calc_diff, get_arch_major\n"
        "assert deep_gemm is ours and deep_gemm.utils.math is plain\n"
        "assert not hasattr(deep_gemm, 'fp8_gemm_nt')\n"
        "print(all(hasattr(deep_gemm, name) for name in deep_gemm.__all__))\n"
    )
    assert run(command=[sys.executable, "-c", code]).strip() == "True"
