#!/usr/bin/env bash
# The GPU tests, with a record: scripts/gpu/tests.sh FOLDER [PROCESSES] [SECONDS]
# PROCESSES (13) share all tests marked `gpu` but the fuzzer's; beside them run those of several
# ranks that share the GPU under MPS, tests that kill a rank last. What has not ended after SECONDS
# (515) is interrupted, and the record says so. Needs pytest and nothing else.
# Writes FOLDER/gpu-tests.txt (provenance, outcomes by file, every failure) and gpu-tests.tgz (logs).
# FOLDER is usually benchmarks/h200.
set -uo pipefail
folder=$(cd "$1" && pwd) || exit 2
num=${2:-13} limit=${3:-515}
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/scripts/gpu" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
CLAIMS=$(mktemp -d) logs=$(mktemp -d)
export CLAIMS
trap 'rm -rf "$CLAIMS" "$logs"' EXIT
python3 -c "import torch; from megamoe.bench.provenance import provenance; print(provenance(torch.device('cuda')))" \
    | tee "$logs/where" || exit 3

tests() {  # SECONDS LOG pytest's arguments
    local most=$1 log=$2
    shift 2
    env --default-signal=INT timeout -s INT -k 15 "$most" python3 -W ignore -m pytest -p no:cacheprovider \
        -m gpu --every -vv -rA --tb=short --durations=8 "$@" > "$logs/$log.log" 2>&1
}
ranks=tests/distributed/test_fused_group_gpu.py
mapfile -t files < <(grep -rlE 'mark\.gpu|MARKS' tests --include='test_*.py' | grep -v -e "$ranks" -e engine/test_fuzz)
for i in $(seq "$num"); do
    tests "$limit" "$i" -p claim "${files[@]}" &
done
tests "$limit" ranks-1 "$ranks" -k "test_processes or serves or other_bounds" &
(tests $((limit * 7 / 10)) ranks-2 "$ranks" -k "2048 or two_layers or gone and not killed"
 tests $((limit * 3 / 10)) ranks-3 "$ranks" -k killed) &
wait
{
    cat "$logs/where"
    sed -nE 's/^(tests[^:]*)::.* (PASSED|FAILED|ERROR|SKIPPED).*/\2 \1/p' "$logs"/*.log | sort | uniq -c
    grep -hE '^(FAILED|ERROR) |Interrupted|^=+ .*(passed|failed|error)' "$logs"/*.log | cut -c1-300
} | tee "$folder/gpu-tests.txt"
tar czf "$folder/gpu-tests.tgz" -C "$logs" .
! grep -qE '^(FAILED|ERROR) |Interrupted' "$folder/gpu-tests.txt"
