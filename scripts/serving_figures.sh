#!/usr/bin/env bash
# What servers ask of a GPU, with a record: scripts/serving_figures.sh FOLDER
# Writes FOLDER/serving.txt: refresh beside a copy, first calls, loading a layer of full size, tokens a
# second of Hugging Face models with experts in BF16, FP8 and FP4, eager and, where the example has
# them, with CUDA graphs. FOLDER is usually benchmarks/h200.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
{
    rc=0
    for recipe in w4a8_block w4a16 nvfp4 w8a8; do
        python3 scripts/refresh_speed.py --recipe "$recipe" || rc=$?
    done
    for recipe in w4a8_block w4a16 nvfp4 w8a8; do
        python3 scripts/refresh_speed.py --recipe "$recipe" --floats || rc=$?
    done
    python3 scripts/first_call.py || rc=$?
    python3 scripts/load_speed.py --device cuda || rc=$?
    python3 scripts/load_speed.py --device cuda --cold || rc=$?
    # 5.17 has no FP4 experts, 5.22 has
    has_fp4=$(python3 -c "import transformers as t; print(tuple(map(int, t.__version__.split('.')[:2])) >= (5, 22))")
    kinds=(bf16 fp8)
    [ "$has_fp4" = False ] || kinds+=(fp4)
    for stored in "${kinds[@]}"; do
        for batch in 1 32; do
            echo "Qwen3-MoE, 8 layers of 64 experts 2048 x 2048, $stored, batch $batch"
            python3 examples/08_transformers.py --stored "$stored" --hidden 2048 --layers 8 \
                --experts 64 --tokens 64 --batch "$batch" || rc=$?
        done
    done
    exit "$rc"
} 2>&1 | tee "$folder/serving.txt"
