#!/usr/bin/env bash
# Run the tests that need a GPU, on all GPUs of this machine at once:
#     bash deploy/gpu_tests.sh OUT [PROCESSES]
# OUT gets NAME.log and NAME.xml of each group of tests, for benchmarks/tested_together.py. A group
# has a GPU for itself, which PROCESSES tests share (default: 12).
# PYTHON names the interpreter (default: python3), GPUS how many GPUs are used (default: all).
set -euo pipefail

case ${1:---help} in -h | --help) sed -n '2,/^[^#]/s/^# //p' "$0" && exit ;; esac
OUT=$(realpath -m -- "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROCESSES=${2:-12} PYTHON=${PYTHON:-python3}
GPUS=${GPUS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
[ "$GPUS" -gt 0 ] || { echo "error: no CUDA GPU is to be seen" >&2 && exit 1; }
mkdir -p "$OUT"
LARGE=tests/kernels/nsa/test_large.py
NAMES=(kernels vllm layers large rest)
declare -A GROUPS_OF=(
    [kernels]="tests/kernels --ignore $LARGE"
    [vllm]="tests/vllm_backend"
    [layers]="tests/nn tests/xformers_op"
    [large]="$LARGE -n 0" # 100 GiB each
    [rest]="tests --ignore tests/kernels --ignore tests/vllm_backend --ignore tests/nn --ignore tests/xformers_op
        --ignore tests/distributed"
    [ranks]="tests/distributed -n 0" # every GPU
)

# group NAME [GPU]: run one group, say how it ended.
group() {
    local name=$1 began=$SECONDS status=0
    [ $# -eq 1 ] || export CUDA_VISIBLE_DEVICES=$2
    # shellcheck disable=SC2086 # several words
    "$PYTHON" -m pytest -m gpu -v -p no:cacheprovider -n "$PROCESSES" --maxschedchunk 1 --durations 20 \
        --junitxml "$OUT/$name.xml" ${GROUPS_OF[$name]} >"$OUT/$name.log" 2>&1 || status=$?
    printf '%s: status %d after %d s: %s\n' "$name" "$status" $((SECONDS - began)) "$(tail -n 1 "$OUT/$name.log")"
    [ "$status" -eq 0 ] || touch "$OUT/failed"
}

# worker GPU: take the groups that are left, one after another.
worker() {
    local index name
    for index in "${!NAMES[@]}"; do
        name=${NAMES[index]}
        if mkdir "$OUT/.$name" 2>/dev/null; then group "$name" "$1"; fi
    done
}

# First, for some thirty tests need them and would fail one by one.
"$PYTHON" -c 'from sparsek_backend.models import fetch_model, fetch_texts; fetch_model(), fetch_texts()'

rm -rf "$OUT/failed" "${NAMES[@]/#/$OUT/.}"
for ((gpu = 0; gpu < GPUS; gpu++)); do worker "$gpu" & done
wait
[ "$GPUS" -eq 1 ] || group ranks
[ ! -e "$OUT/failed" ]
