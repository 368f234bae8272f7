"""Front-coded names, decoded independently of the page."""

from __future__ import annotations

from typing import Any


def decode_names(coded: Any) -> list[str]:
    names: list[str] = []
    parts: list[str] = []
    for shared, ending in zip(coded["shared"], coded["ending"], strict=True):
        parts = parts[:shared] + coded["endings"][ending].split(".")
        names.append(".".join(parts))
    return names
