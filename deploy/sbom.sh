#!/usr/bin/env bash
# Write a CycloneDX bill of materials of what installing a wheel brings: bash deploy/sbom.sh WHEEL OUT.json
set -euo pipefail

if [ $# -ne 2 ]; then
    printf 'usage: bash deploy/sbom.sh WHEEL OUT.json\n' >&2
    exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}
"$python" -m venv "$work/installed"
"$work/installed/bin/python" -m pip install --quiet "$1"
"$python" -m venv "$work/tool"
"$work/tool/bin/python" -m pip install --quiet 'cyclonedx-bom>=6'
"$work/tool/bin/cyclonedx-py" environment --output-reproducible --of JSON -o "$2" "$work/installed/bin/python"
