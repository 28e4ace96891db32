"""The code blocks of pages, for tests that run or follow them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def code_blocks(page: str, language: str = "python") -> list[str]:
    """Return the blocks of a page, such as "docs/how-to/add-a-model.md", in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
