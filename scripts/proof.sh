#!/usr/bin/env bash
# The memory model at its full counts: all interleavings of every case, every planted bug from three
# first seeds. Prints seeds and seconds; docs/proof.md has what a run of it found.
#   scripts/proof.sh [--workers 2] [--within-s 240] [--only CASE]
# Without --within-s no time is too long: other work on the machine must not fail it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup "[test]" torch numpy pytest hypothesis
export OMP_NUM_THREADS=1
exec "$PY" -m tests.proof.full "$@"
