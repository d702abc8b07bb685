#!/usr/bin/env bash
# Execute the notebooks of examples/notebooks on the small model, on a CPU or a GPU; a few minutes.
# --write keeps what they print; otherwise they are only run. Names run these alone: serve, train.
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_on "$@"
out=$(mktemp -d)
trap 'stop_heartbeat; rm -rf "$out"' EXIT
names=()
for word in "$@"; do
    case $word in
    --write) out=examples/notebooks && trap stop_heartbeat EXIT ;;
    *) names+=("examples/notebooks/$word.ipynb") ;;
    esac
done
if [ ${#names[@]} -eq 0 ]; then names=(examples/notebooks/*.ipynb); fi
setup bench,eval,patterns,docs

export PYTHONWARNINGS=ignore VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
for name in "${names[@]}"; do
    logged "running $name" "$VENV/bin/python" -m nbconvert --to notebook --execute "$name" \
        --output-dir "$out" --ExecutePreprocessor.timeout=900 --ExecutePreprocessor.record_timing=False ||
        { tail -n 40 "$SETUP_LOG" >&2 && die "$name failed"; }
done
