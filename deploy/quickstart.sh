#!/usr/bin/env bash
# Serve a small real model with SparseK's sparse attention and talk to it: see usage below.
set -euo pipefail

usage() {
    cat <<'TXT'
usage: bash deploy/quickstart.sh [--port N] [--keep] [--model DIR]

Makes .venv, installs vLLM and SparseK, prepares SmolLM2-135M-Instruct, starts
`vllm serve ... --attention-backend SPARSEK` on 127.0.0.1, asks a chat question and a question
about a long document, prints tokens/s and the share of the context that was attended, and stops.

  --port N      the server's port (default 8000)
  --keep        leave the server running and print how to talk to it and how to stop it
  --model DIR   serve this Hugging Face folder instead of SmolLM2-135M-Instruct

SK_VENV names another folder than .venv; PYTHON names the interpreter that makes it.
TXT
}

wrong() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

arguments=()
port=8000
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --keep) arguments+=("$1") ;;
    --port | --model)
        [ $# -ge 2 ] || wrong "$1 needs a value"
        value=$2
        # Wrong values are found here, not after minutes of set-up.
        if [ "$1" = --model ]; then
            [ -d "$2" ] || wrong "--model: expected a Hugging Face folder, got $2"
            value=$(realpath -- "$2")
        else
            port=$2
            { [ "$port" -ge 1 ] && [ "$port" -le 65535 ]; } 2>/dev/null || wrong "--port: expected 1 to 65535, got $port"
        fi
        arguments+=("$1" "$value")
        shift
        ;;
    *)
        printf 'error: unknown option %s\n' "$1" >&2
        usage >&2
        exit 2
        ;;
    esac
    shift
done

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# The server start checks again; this one saves waiting for the set-up first.
if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    die "port $port is in use: stop what uses it or choose another with --port"
fi
setup bench,eval
exec "$VENV/bin/python" -m sparsek_backend.quickstart ${arguments[@]+"${arguments[@]}"}
