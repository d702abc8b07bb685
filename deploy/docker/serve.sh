#!/bin/sh
# `vllm serve` with SPARSEK on all addresses. Arguments go to vLLM: a model, then options.
set -eu
# Counters of processes that are gone would stay on /metrics.
mkdir -p "${PROMETHEUS_MULTIPROC_DIR:?must name a folder}"
find "$PROMETHEUS_MULTIPROC_DIR" -mindepth 1 -delete
# vLLM wants the model first; of an option given twice, the last one counts.
model=${1:---help}
if [ $# -gt 0 ]; then shift; fi
exec vllm serve "$model" --host 0.0.0.0 --port 8000 --attention-backend SPARSEK "$@"
