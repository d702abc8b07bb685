#!/usr/bin/env bash
# Build wheel and sdist into a folder, install each into a new environment, and run `sparsek doctor` there.
# bash deploy/distributions.sh FOLDER
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# //p' "$0" && exit ;; esac
if [ $# -ne 1 ]; then
    printf 'usage: bash deploy/distributions.sh FOLDER\n' >&2
    exit 2
fi
unset CDPATH # cd would print where it went
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}
"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet --require-hashes -r deploy/docker/build-requirements.txt
"$work/build/bin/python" -m hatchling build -t wheel -t sdist -d "$out"

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' sparsek_backend/__init__.py)
for file in "$out/sparsek_backend-$version-py3-none-any.whl" "$out/sparsek_backend-$version.tar.gz"; do
    printf '==> %s\n' "$file"
    "$python" -m venv --clear "$work/installed"
    "$work/installed/bin/python" -m pip install --quiet "$file"
    # Without vLLM serving would not work, which is status 1.  Nothing else may be wrong.
    status=0
    found=$(cd "$work" && installed/bin/sparsek doctor --json) || status=$?
    printf '%s\n' "$found"
    "$work/installed/bin/python" - "$status" "$found" <<'PY'
import json
import sys

wrong = {row["subject"] for row in json.loads(sys.argv[2]) if row["status"] == "problem"}
if sys.argv[1] != "1" or wrong != {"vLLM"}:
    sys.exit(f"error: expected vLLM alone to be missing, got status {sys.argv[1]} and {sorted(wrong)}")
PY
done
