#!/usr/bin/env bash
# Check and test everything, as CI does: lint, types, import rules, then the tests.
# Arguments go to pytest: `bash deploy/test.sh tests/cli -x`.
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
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

selection=()
has_gpu || selection=(-m "not gpu")
printf '==> pytest\n'
status=0
"$VENV/bin/python" -m pytest ${selection[@]+"${selection[@]}"} "$@" || status=$?
if [ "$status" -eq 0 ] && [ ${#failed[@]} -gt 0 ]; then
    status=1
fi
exit "$status"
