#!/usr/bin/env bash
# Build the CPU image, serve it with compose and Prometheus, ask it, and read its counters. Needs Docker.
# `--gpu` builds the GPU image too, which downloads vLLM's image (about 10 GB).
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# //p' "$0" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")"

profile=cpu
if [ "${1:-}" = --gpu ]; then profile=gpu; fi
export PORT=${PORT:-8000}
url=http://127.0.0.1:$PORT
compose() { docker compose --profile "$profile" --profile monitoring "$@"; }
trap 'compose down' EXIT

compose build
compose up --detach --wait --wait-timeout 1500
model=$(curl -fsS "$url/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
curl -fsS "$url/v1/completions" -H 'Content-Type: application/json' \
    -d "{\"model\": \"$model\", \"prompt\": \"The capital of France is\", \"max_tokens\": 8}"
printf '\n'
curl -fsS "$url/metrics" | grep -E '^sparsek_context_tokens_total\{.*\} [1-9]'
for _ in $(seq 30); do
    scraped=$(curl -fsS -G http://127.0.0.1:9090/api/v1/query --data-urlencode 'query=up{job="sparsek"}')
    case $scraped in *'"1"]'*) break ;; esac
    sleep 2
done
case $scraped in *'"1"]'*) ;; *) printf 'error: Prometheus does not see the server: %s\n' "$scraped" >&2 && exit 1 ;; esac
test "$(docker compose --profile "$profile" exec -T "$profile" id -u)" != 0
printf 'the images build, serve and count\n'
