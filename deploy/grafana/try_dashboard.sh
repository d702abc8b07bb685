#!/usr/bin/env bash
# Start a server of the small model and Prometheus, send traffic from the example clients, and check that every
# query of the dashboard has data. After deploy/quickstart.sh; needs Debian or Ubuntu, no root, two minutes.
# An argument names a file for a picture of the panels, drawn without Grafana.
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
help_on "$@"
python=$VENV/bin/python
work=$(mktemp -d)
pids=()
stop() {
    if [ ${#pids[@]} -gt 0 ]; then kill "${pids[@]}" 2>/dev/null || true; fi
    stop_heartbeat
}
trap stop EXIT

prometheus=$(command -v prometheus || true)
if [ -z "$prometheus" ]; then
    say "==> fetching Debian's prometheus into $work"
    (cd "$work" && apt-get download -q prometheus && dpkg -x prometheus_*.deb .)
    prometheus=$work/usr/bin/prometheus
fi
"$(dirname "$prometheus")/promtool" test rules deploy/grafana/alerts_test.yml

say "==> starting the server (log: $work/server.log)"
model=$("$python" -m sparsek_backend model fetch)
mkdir "$work/metrics"
PROMETHEUS_MULTIPROC_DIR=$work/metrics VLLM_CPU_KVCACHE_SPACE=1 VLLM_HOST_IP=127.0.0.1 HF_HUB_OFFLINE=1 \
    "$VENV/bin/vllm" serve "$model" --attention-backend SPARSEK --enforce-eager --served-model-name small \
    --additional-config '{"sparsek": {"top_k": 16, "decode_tokens": 1024, "dense_below": 1024, "time_selection": true}}' \
    --enable-auto-tool-choice --tool-call-parser hermes --host 127.0.0.1 --port 8000 >"$work/server.log" 2>&1 &
pids+=($!)
for _ in $(seq 150); do
    if "$python" -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=4)' 2>/dev/null; then break; fi
    kill -0 "${pids[0]}" || die "the server stopped; its log is $work/server.log"
    sleep 2
done

say "==> starting Prometheus"
sed 's/server:8000/127.0.0.1:8000/' deploy/grafana/prometheus.yml >"$work/prometheus.yml"
cp deploy/grafana/alerts.yml "$work"
"$prometheus" --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/data" \
    --web.listen-address=127.0.0.1:9090 >"$work/prometheus.log" 2>&1 &
pids+=($!)

if command -v node >/dev/null; then
    (cd examples/clients && npm install --silent --no-audit --no-fund --prefix "$work/node" openai)
    cp examples/clients/client.mjs "$work/node"
fi
document=$work/document.txt
"$python" -c 'from sparsek_backend.models import fetch_texts; print((fetch_texts() / "1862-Lincoln-1.txt").read_text()[:20000])' >"$document"
for _ in 1 2 3; do # a rate needs several scrapes
    "$python" examples/clients/client.py --document "$document"
    if [ -d "$work/node" ]; then node "$work/node/client.mjs" --document "$document"; fi
    sleep 6
done
"$python" deploy/grafana/panels_have_data.py http://127.0.0.1:9090
if [ $# -gt 0 ]; then "$python" deploy/grafana/picture.py http://127.0.0.1:9090 "$1"; fi
