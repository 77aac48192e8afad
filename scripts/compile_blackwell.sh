#!/usr/bin/env bash
# Every configuration that plans of the Blackwell backend take, compiled for sm_100a and sm_103a without
# a GPU: with the tested Triton, then with 3.9.0 in a folder of its own (half an hour on two cores).
#   scripts/compile_blackwell.sh [ARGUMENT...]      ARGUMENTs go to scripts/compile_blackwell.py
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup "[test]" torch numpy rich safetensors typer pytest
PYTHONPATH="$PWD:$PWD/scripts" OMP_NUM_THREADS=1 "$PY" -W ignore scripts/compile_blackwell.py "$@"
scripts/newer_triton.sh --blackwell -- "$@"
