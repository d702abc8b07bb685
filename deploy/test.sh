#!/usr/bin/env bash
# Check and test everything, as CI does: lint, types, import rules, then the tests.
# Arguments go to pytest: `bash deploy/test.sh tests/cli -x`.
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_on "$@"
setup dev

failed=()
check() {
    printf '==> %s\n' "$*"
    "$VENV/bin/python" -m "$@" || failed+=("$1")
}

check ruff check .
check ruff format --check .
check mypy
printf '==> lint-imports\n'
"$VENV/bin/lint-imports" --no-cache || failed+=(lint-imports)
if [ ${#failed[@]} -gt 0 ]; then
    say "failed so far: ${failed[*]}; the tests run all the same"
fi

# Without a GPU, two workers of one thread each; a file's tests stay together, so that the engine
# they share is started once. tests/conftest.py sets the threads and the order: long files first.
# A worker that crashes ends the run: another would start with the very test that ended the first.
options=()
if ! has_gpu; then
    options=(-m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0)
fi
printf '==> pytest\n'
status=0
"$VENV/bin/python" -m pytest ${options[@]+"${options[@]}"} "$@" || status=$?
if [ "$status" -eq 0 ] && [ ${#failed[@]} -gt 0 ]; then
    status=1
fi
exit "$status"
