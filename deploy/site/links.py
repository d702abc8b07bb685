"""Check the links of a built site: every page, file and anchor that one names is there.

    python deploy/site/links.py site

Links to other hosts are not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what the tag names."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


def broken(folder: Path) -> list[str]:
    """Return one line for each link of a folder (absolute) that leads nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    found = []
    for path, page in sorted(pages.items()):
        if path.name == "404.html":  # its links begin at the site's root
            continue
        for link in sorted(page.links):
            name, anchor = urldefrag(unquote(link))
            if "//" in name or name.startswith(("data:", "mailto:")):
                continue
            target = (path.parent / name).resolve() if name else path
            if target.is_dir():
                target /= "index.html"
            there = pages.get(target)
            if not target.is_file() or (anchor and there and anchor not in there.anchors):
                found.append(f"{path.relative_to(folder)}: {link}")
    return found


def main() -> int:
    """Print the broken links; the exit status is 1 if there are any."""
    folder = Path(sys.argv[1]).resolve()
    if not (folder / "index.html").is_file():
        raise SystemExit(f"{folder} has no index.html: build the site first")
    lines = broken(folder)
    print("\n".join(lines) or f"no broken link below {folder}")
    return min(len(lines), 1)


if __name__ == "__main__":
    sys.exit(main())
