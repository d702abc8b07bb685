#!/usr/bin/env bash
# Build the documentation site into site/; a broken link ends it. Needs: pip install '.[docs]'.
# --serve shows it on http://127.0.0.1:8000 and builds it again when a page changes.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# //p' "$0" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${SK_VENV:-.venv}/bin/python
if ! "$python" -c 'import mkdocs' 2>/dev/null; then python=python3; fi
if ! "$python" -c 'import mkdocs' 2>/dev/null; then
    printf "error: mkdocs is not installed: run pip install '.[docs]'\n" >&2
    exit 1
fi
export NO_MKDOCS_2_WARNING=1
if [ "${1:-}" = --serve ]; then exec "$python" -m mkdocs serve; fi
"$python" -m mkdocs build --strict
