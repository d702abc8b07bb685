#!/usr/bin/env bash
# Run the steps of both Dockerfiles in a fresh Debian root, without Docker, then serve from it.
# Needs root, debootstrap and the network; takes about ten minutes. Not part of CI.
#   sudo bash deploy/docker/test_steps.sh [FOLDER]     FOLDER is made; 8 GB
# The root that the CPU image's steps leave stands for vLLM's image when the other Dockerfile runs.
# TORCH_INDEX= names no further index for pip. BIND lists host paths that pip's settings name.
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
help_on "$@"
root=${1:-$(mktemp -d)/root}
python=$VENV/bin/python
"$python" -c 'import dockerfile_parse' || die "run bash deploy/test.sh first, which sets up $VENV"
options=(--root "$root")
for path in ${BIND:-}; do options+=(--bind "$path"); done
if [ -n "${TORCH_INDEX+set}" ]; then options+=(--build-arg "TORCH_INDEX=$TORCH_INDEX"); fi
steps() { unshare --mount "$python" deploy/docker/run_steps.py "$@"; }

say "==> a fresh root in $root"
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$root" >/dev/null
ln -sf python3 "$root/usr/bin/python" # Docker's python image has both names

steps deploy/docker/Dockerfile.cpu "${options[@]}"

say "==> serving"
unshare --mount --pid --fork --kill-child \
    "$python" deploy/docker/run_steps.py deploy/docker/Dockerfile.cpu "${options[@]}" --only-command --start &
server=$!
trap 'kill -9 $server 2>/dev/null || true' EXIT
for _ in $(seq 150); do
    if "$python" -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=4)' 2>/dev/null; then break; fi
    kill -0 "$server"
    sleep 2
done
"$python" - <<'PY'
import json
import urllib.request

url = "http://127.0.0.1:8000"
body = json.dumps({"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 8})
request = urllib.request.Request(f"{url}/v1/completions", body.encode(), {"Content-Type": "application/json"})
text = json.load(urllib.request.urlopen(request))["choices"][0]["text"]
metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
assert "Paris" in text, text
assert "sparsek_context_tokens_total" in metrics
print(f"answered {text!r}, and /metrics counts it")
PY
kill -9 "$server" # takes the process namespace with it
wait "$server" || true

say "==> the steps of the GPU image, with the CPU image in vLLM's place"
dist=$(mktemp -d)
"$python" -m hatchling build -t wheel -d "$dist"
chroot "$root" userdel sparsek
steps deploy/docker/Dockerfile "${options[@]}" --stage "wheel=$dist" \
    --env PATH=/opt/sparsek/venv/bin:/usr/local/bin:/usr/sbin:/usr/bin:/bin \
    --then "python3 -c 'import importlib.metadata as m; print(m.entry_points(group=\"vllm.general_plugins\"))'"
say "both Dockerfiles' steps run; the server answers"
