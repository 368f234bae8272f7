"""Links that lead out of the site's folder, into the repository, are shown as paths: the site does not have them."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return re.sub(r"\[([^\]]*)\]\(\.\./((?:src|tests|benchmarks|CONTRIBUTING)[^)#]*)\)", _named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link.groups()
    return f"`{path}`" if text.strip("`") == path.rsplit("/", maxsplit=1)[-1] else f"{text} (`{path}`)"
