#!/usr/bin/env bash
# Build the documentation site into site/ and check its links. Needs: pip install '.[docs]'.
# --serve shows it on http://127.0.0.1:8000 and builds it again when a page changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --serve ]; then
    exec mkdocs serve
fi
mkdocs build --strict
python deploy/site/links.py site
