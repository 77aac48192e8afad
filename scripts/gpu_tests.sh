#!/usr/bin/env bash
# The GPU tests, with a record: scripts/gpu_tests.sh FOLDER [pytest arguments]
# Writes FOLDER/gpu-tests.txt: provenance, passed and failed tests by file, pytest's last line.
# FOLDER is usually benchmarks/h200.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
rc=0
python3 -m pytest -m gpu --every -vv -p no:cacheprovider -rA "$@" 2>&1 | tee "$log" || rc=$?
{
    python3 -c "import torch; from megamoe.bench.provenance import provenance; print(provenance(torch.device('cuda')))"
    sed -nE 's/^(PASSED|FAILED|ERROR) (tests[^:]*)::.*/\1 \2/p' "$log" | sort | uniq -c
    grep -E '^[0-9]+ (passed|failed)|^=+ .*(passed|failed).* =+$' "$log" | tail -n 1
} | tee "$folder/gpu-tests.txt"
exit "$rc"
