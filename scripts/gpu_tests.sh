#!/usr/bin/env bash
# The GPU tests, with a record: scripts/gpu_tests.sh FOLDER [pytest arguments]
# Writes FOLDER/gpu-tests.txt: provenance, then one line per test. FOLDER is usually benchmarks/h200.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
{
    python3 -c "import torch; from megamoe.bench.provenance import provenance; print(provenance(torch.device('cuda')))"
    python3 -m pytest -m gpu -p no:cacheprovider -rA -n 0 "$@" 2>&1
} | tee "$folder/gpu-tests.txt"
