"""The bytes of the files below a directory."""

from __future__ import annotations

from pathlib import Path


def read_state_files(folder: Path) -> dict[str, bytes]:
    """The files whose bytes depend on the state alone: all but the manifest and what belongs to single ranks."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if name != "manifest.json" and not name.startswith("ranks")}
