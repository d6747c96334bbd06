"""The pages whose commands and figures are checked."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("configuration", "kubernetes", "operations", "comparison", "design")),
)
"""Pages of others (launch, api, security, observability, bench) are checked beside what they describe."""

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in this language, without their fences."""
    return [text.rstrip("\n") for kind, text in _FENCE.findall((ROOT / page).read_text()) if kind == language]


def every_block(language: str) -> list[tuple[str, str]]:
    return [(page, text) for page in PAGES for text in blocks(page, language)]
