"""README.md as a package index shows it, where links into the source tree lead nowhere. For hatchling.

Data flow:
    README.md -> its relative links as links to `Source` of [project.urls], at the tag of this version; text without it
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Fills in `readme`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` in the table [project]."""
        source = metadata.get("urls", {}).get("Source")
        target = rf"[\1]({source}/blob/v{metadata['version']}/\2)" if source else r"\1"
        text = LINK.sub(target, (Path(self.root) / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
