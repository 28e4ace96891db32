"""The code blocks of the pages in docs/how-to/, for tests that follow them."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[1] / "docs" / "how-to"


def code_blocks(page: str, language: str = "python") -> list[str]:
    """Return the blocks of a page, such as "add-a-model", in their order."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
