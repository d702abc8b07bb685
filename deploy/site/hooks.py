"""What mkdocs builds beyond docs/: fresh tables, notebooks as pages, files of the repository."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from nbconvert import MarkdownExporter
from tables import ROOT, fill

DOCS = ROOT / "docs"
NOTEBOOKS = ROOT / "examples" / "notebooks"
FILES = "files"
"""Where files that lie outside of docs/ are on the site."""

LINK = re.compile(r"(\]\()([^)\s#]+)([^)]*\))")
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):(?=<code>|`)")


def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks, and every file outside of docs/ that a page links to."""
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # settings are read from the source
    exporter = MarkdownExporter()
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, _ = exporter.from_filename(str(notebook))
        text = text.replace("](../../docs/", "](../")
        source = f"\n[The notebook](../../examples/notebooks/{notebook.name})\n"
        page = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, page, content=text + source))
    for page in [file for file in files if file.is_documentation_page()]:
        for link in LINK.finditer(page.content_string):
            if target := outside(page.src_uri, link[2]):
                path = str(target.relative_to(ROOT))
                files.append(File.generated(config, f"{FILES}/{path}", abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make the tables anew, and point links to where the site has their files."""

    def move(link: re.Match[str]) -> str:
        target = outside(page.file.src_uri, link[2])
        if target is None:
            return link[0]
        here = os.path.dirname(page.file.src_uri)
        path = os.path.relpath(f"{FILES}/{target.relative_to(ROOT)}", here)
        return f"{link[1]}{path}{link[3]}"

    return LINK.sub(move, fill(markdown))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Drop the roles of reStructuredText, which docstrings have before names."""
    return ROLE.sub("", html)


def outside(page: str, link: str) -> Path | None:
    """Return the file of the repository that a link names, if it lies outside of docs/.

    Args:
        page: path of the page inside docs/.
        link: the link as it stands in the page, without its anchor.
    """
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    target = Path(os.path.normpath(DOCS / Path(page).parent / link))
    inside = target.is_relative_to(DOCS) or not target.is_relative_to(ROOT)
    return None if inside or not target.is_file() else target
