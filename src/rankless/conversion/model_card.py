"""The model card (``README.md``) of an exported model: its metadata for the Hub, and the checkpoint that it comes from.

:mod:`rankless.conversion.hub_export` builds it on each rank, in the vote "preparing the export". All ranks must get the
same text: it has no time of a clock.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from dataclasses import dataclass

from rankless._version import __version__
from rankless.ondisk.manifest import Manifest


@dataclass(frozen=True)
class CardMetadata:
    """The metadata at the head of a card, by the Hub's names. Empty texts are left out."""

    library_name: str = ""
    license: str = ""
    base_model: str = ""


@dataclass(frozen=True)
class CardSource:
    """The checkpoint: its name, its manifest if it is one of rankless, and the number and dtypes of the elements."""

    name: str
    manifest: Manifest | None
    size: str


def build_card(title: str, metadata: CardMetadata, source: CardSource) -> str:
    """Return a card that describes where a model comes from, with a place for everything else."""
    fields = {"library_name": metadata.library_name, "license": metadata.license, "base_model": metadata.base_model}
    head = "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items() if value)
    rows = "".join(f"| {_escape_cell(name)} | {_escape_cell(value)} |\n" for name, value in _describe_source(source))
    return (
        f"---\n{head}---\n\n# {_escape_cell(title)}\n\n"
        "<!-- What the model does, what it was trained on, and its limits. -->\n\n"
        f"## Provenance\n\n| | |\n|---|---|\n{rows}"
    )


def _describe_source(source: CardSource) -> Iterator[tuple[str, str]]:
    manifest = source.manifest
    yield "checkpoint", source.name
    if manifest is not None:
        saved = dt.datetime.fromtimestamp(manifest.time, dt.UTC)
        if manifest.step is not None:
            yield "step", f"{manifest.step:,}"
        for name, value in sorted(manifest.metrics.items()):
            yield name, f"{value:.6g}" if value is not None else "not a number"
        yield "saved", f"{saved:%Y-%m-%d %H:%M} UTC"
        yield "ranks that saved it", str(manifest.provenance.world_size)
        if manifest.provenance.torch:  # none if a conversion wrote it
            yield "PyTorch", manifest.provenance.torch
        yield "id", manifest.id
    yield "elements", source.size
    yield "exported by", f"rankless {__version__}"


def _escape_cell(text: str) -> str:
    """Return a text that stays in one cell of a table. For example, a line feed becomes a space."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
