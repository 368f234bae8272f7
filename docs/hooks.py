"""A MkDocs hook that shows links to files of the repository, which the site does not have, as paths."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with links out of ``docs/`` replaced by paths. MkDocs calls this for each page."""
    return re.sub(r"\[([^\]]*)\]\(\.\./((?:src|tests|benchmarks|CONTRIBUTING)[^)#]*)\)", _format_link, markdown)


def _format_link(link: re.Match[str]) -> str:
    text, path = link.groups()
    return f"`{path}`" if text.strip("`") == path.rsplit("/", maxsplit=1)[-1] else f"{text} (`{path}`)"
