#!/usr/bin/env bash
# What proves the kernels on a GPU, side by side, with records: scripts/gpu/proofs.sh FOLDER
# The fuzzer's 50,000 calls, a certificate's checks, compute-sanitizer over every kernel; and what
# timings.sh launches is compiled. Some 490 s on 16 cores; each part has a limit of its own.
# Writes FOLDER/fuzz.txt, certify.json, sanitizer.txt and proofs.tgz (logs).
set -uo pipefail
folder=$(cd "$1" && pwd) || exit 2
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

fuzz() {
    timeout 150 python3 scripts/gpu/compile_fuzzer.py
    timeout 330 python3 scripts/fuzz.py "$folder"
}
certify() {
    timeout 480 python3 -m megamoe certify --backend hopper --recipe w4a8_block --recipe w8a8 --recipe w4a16 \
        --no-certificate --out "$folder/certify.json"
}
sanitize() {
    mkdir "$logs/sanitizer"
    timeout 480 python3 scripts/sanitize.py "$logs/sanitizer" --tools memcheck,racecheck,synccheck --jobs 6 --limit-s 120
    cp "$logs/sanitizer/sanitizer.txt" "$folder"
}
warm() {
    for recipe in w4a8_block w4a16 nvfp4 w8a8; do
        nice -n 5 python3 scripts/refresh_speed.py --recipe "$recipe" --rounds 2
        nice -n 5 python3 scripts/refresh_speed.py --recipe "$recipe" --rounds 2 --floats
    done
    local made=(--tokens 8,64,512,2048,8192 --no-graphs --processes 6)
    nice -n 5 python3 -m megamoe compile deepseek-v4-flash --experts 32 "${made[@]}"
    nice -n 5 python3 -m megamoe compile deepseek-v4-pro --experts 48 "${made[@]}"
    nice -n 5 python3 -m megamoe compile deepseek-v3 --experts 32 --recipe w8a8 "${made[@]}"
    nice -n 5 python3 -m megamoe compile gpt-oss-120b "${made[@]}"
    nice -n 5 python3 scripts/fused_ranks.py --recipes w4a8_block
}
for part in fuzz certify sanitize warm; do
    "$part" > "$logs/$part.log" 2>&1 &
done
wait
tail -n 25 "$logs"/*.log | cut -c1-250
tar czf "$folder/proofs.tgz" -C "$logs" .
