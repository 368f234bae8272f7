"""Hooks of MkDocs: the addresses of the project, and links to files of the repository, which the site does not have."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Set the addresses of the site and of the repository from ``pyproject.toml``, where they are while they exist."""
    urls = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["urls"]
    config["site_url"], config["repo_url"] = urls.get("Documentation", ""), urls.get("Repository")
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with links out of ``docs/`` replaced by paths. MkDocs calls this for each page."""
    return re.sub(r"\[([^\]]*)\]\(\.\./((?:src|tests|benchmarks|CONTRIBUTING)[^)#]*)\)", _format_link, markdown)


def _format_link(link: re.Match[str]) -> str:
    text, path = link.groups()
    return f"`{path}`" if text.strip("`") == path.rsplit("/", maxsplit=1)[-1] else f"{text} (`{path}`)"
