"""Metadata of wheel and sdist: links that hold outside of the repository, by REPOSITORY_URL."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """README and ``project.urls``; without REPOSITORY_URL the README as it is, and no URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both fields. Links lead to the tag of this version."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if url := os.environ.get("REPOSITORY_URL", "").rstrip("/"):
            tag = f"v{metadata['version']}"

            def absolute(link: re.Match[str]) -> str:
                view = "raw" if link[1] else "blob"
                return f"{link[1]}[{link[2]}]({url}/{view}/{tag}/{link[3]})"

            text = LINK.sub(absolute, text)
            metadata["urls"] = {
                "Repository": url,
                "Documentation": f"{url}/tree/{tag}/docs",
                "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
