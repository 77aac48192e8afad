#!/usr/bin/env bash
# A newer Triton than the tested one: makes a folder of its own and compiles shipped configurations
# there for sm_90a, sm_100a and sm_103a, without a GPU.
#   scripts/newer_triton.sh [--every | --blackwell] [VERSION] [-- ARGUMENT...]
# --every   all of them (half an hour on two cores); else 84, some of every kind (two minutes)
# --blackwell   all that plans of the Blackwell backend take, by scripts/compile_blackwell.py
# VERSION   3.9.0 unless given; ARGUMENTs go to the script
# Where the registry does not have the version for this Python it says "not available" and exits with 0,
# in CI (the environment variable CI) with 1.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
script=newer_triton.py how=(--take 84) version=3.9.0
while [ $# -gt 0 ]; do
    case $1 in
    --every) how=(--take 0) ;;
    --blackwell) script=compile_blackwell.py how=() ;;
    --) shift; break ;;
    *) version=$1 ;;
    esac
    shift
done
setup "[test]" torch numpy rich safetensors typer pytest
folder=$PWD/.venv-triton-$version
if ! [ -f "$folder/.complete" ]; then
    say "installing triton $version into $folder (300 MB)"
    if ! timeout 600 "$PY" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
        --target "$folder" "triton==$version"; then
        rm -rf "$folder"
        say "not available: triton $version cannot be installed here; NOTHING was compiled with it"
        [ -z "${CI:-}" ] || exit 1   # what CI does not compile, it must not pass
        exit 0
    fi
    touch "$folder/.complete"
fi
# First in the path, before the environment's own Triton; caches of its own.
export PYTHONPATH="$folder:$PWD:$PWD/scripts" OMP_NUM_THREADS=1 TRITON_CACHE_DIR="$folder/cache"
found=$("$PY" -W ignore -c 'import triton; print(triton.__version__)' 2>/dev/null)
[ "$found" = "$version" ] || { say "triton $found was imported, not $version"; exit 1; }
"$PY" -W ignore "scripts/$script" ${how[@]+"${how[@]}"} "$@" 2> "$folder/errors" || {
    rc=$?
    tail -n 60 "$folder/errors"
    exit "$rc"
}
