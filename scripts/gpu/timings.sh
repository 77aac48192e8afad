#!/usr/bin/env bash
# What is timed on a GPU, one after the other, most important first: scripts/gpu/timings.sh FOLDER [SECONDS]
# Ends after SECONDS (535) and names what was left out. The GPU must have nothing else to do.
# Writes FOLDER/timings.txt and the records of `megamoe bench headline` and `bench overlap`.
set -uo pipefail
folder=$(cd "$1" && pwd) || exit 2
end=$((SECONDS + ${2:-535}))
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1

run() {  # SECONDS command
    local left=$((end - SECONDS)) most=$1
    shift
    [ "$left" -gt 15 ] || { echo "left out: $*"; return; }
    echo "== $* ($SECONDS s)"
    timeout $((left < most ? left : most)) "$@" || echo "exit code $?"
}
{
    for source in "" --floats; do
        for recipe in w4a8_block w8a8 nvfp4 w4a16; do
            run 30 python3 scripts/refresh_speed.py --recipe "$recipe" ${source:+"$source"}
        done
    done
    run 60 python3 scripts/first_call.py
    run 230 python3 -m megamoe bench headline --rounds 3 --repeats 15 --out "$folder"
    run 60 python3 scripts/fused_ranks.py --recipes w4a8_block
    run 80 python3 -m megamoe bench overlap --workloads flash-ep8 --tokens 512,2048 --recipes w4a8_block,w8a8 --out "$folder"
    for batch in 1 32; do
        run 50 python3 examples/08_transformers.py --hidden 2048 --layers 8 --experts 64 --tokens 64 --batch "$batch"
    done
    run 60 python3 scripts/load_speed.py --device cuda
} 2>&1 | tee "$folder/timings.txt"
