#!/usr/bin/env bash
# compute-sanitizer over every portable kernel: scripts/sanitize.sh FOLDER [TOOL ...]
# TOOL: memcheck, racecheck, synccheck; all of them unless named. Writes FOLDER/sanitizer.txt:
# provenance, a line per tool, and what was found. FOLDER is usually benchmarks/h200.
# Exit codes: 0 clean, 1 something found or a tool did not end, 3 compute-sanitizer is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck synccheck)
cuda=${CUDA_HOME:-/usr/local/cuda}
sanitizer=$(command -v compute-sanitizer || true)
for place in "$cuda/bin" "$cuda/compute-sanitizer" "$cuda/extras/compute-sanitizer"; do
    if [ -z "$sanitizer" ] && [ -x "$place/compute-sanitizer" ]; then
        sanitizer=$place/compute-sanitizer
    fi
done
if [ -z "$sanitizer" ]; then
    echo "compute-sanitizer is neither on PATH nor in $cuda; install the CUDA toolkit's cuda-sanitizer package" >&2
    exit 3
fi
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
calls=scripts/sanitize_calls.py
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Compile first, all recipes at once: under a tool it would take minutes.
pids=()
for name in bf16 w8a8 w4a16 w4a8 w4a8_block w4a4 nvfp4 quantisers; do
    python3 "$calls" "$name" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done

export PYTORCH_NO_CUDA_MEMORY_CACHING=1
rc=0
{
    python3 -c "import torch; from megamoe.bench.provenance import provenance; print(provenance(torch.device('cuda')))"
    "$sanitizer" --version | tail -n 1
    for tool in "${tools[@]}"; do
        began=$SECONDS
        code=0
        timeout 240 "$sanitizer" --tool "$tool" --print-limit 20 --error-exitcode 9 \
            python3 "$calls" >"$log" 2>&1 || code=$?
        found=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 1 | sed -E 's/^=+ *//' || true)
        case $code in
        0) ;;
        124) rc=1 found="not ended after 240 s; ${found:-no summary}" ;;
        *) rc=1 ;;
        esac
        echo "$tool: ${found:-no summary, exit $code} ($(grep -c '^done' "$log" || true) of 8 parts, $((SECONDS - began)) s)"
        if [ "$code" -ne 0 ]; then
            grep -E '^=+' "$log" | head -n 60 || true
            tail -n 5 "$log"
        fi
    done
} >"$folder/sanitizer.txt"
cat "$folder/sanitizer.txt"
exit "$rc"
