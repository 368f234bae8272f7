"""The page of an open checkpoint in a notebook: the facts of ``rankless show``, in a few tables.

:class:`rankless.Checkpoint` calls it when a notebook shows one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankless.formats.reader import Reader
from rankless.inspection.folding import fold_tensors
from rankless.inspection.inspected_checkpoint import VALUE_GROUPS, InspectedCheckpoint, describe_unread
from rankless.observe.html import HtmlTable, build_html
from rankless.observe.units import format_count, format_metrics, format_size, format_time

if TYPE_CHECKING:
    from rankless.ondisk.manifest import Manifest


def describe_checkpoint(
    reader: Reader, manifest: Manifest | None, tag: str, metrics: Mapping[str, float | None]
) -> str:
    """Return HTML with the format, the step, the size, the groups and the tensors. Equal layers are folded."""
    inspected = InspectedCheckpoint(reader.path, reader, manifest)
    tensors = {
        f"{group}/{name}": info for group, name, info in inspected.iterate_tensors() if group not in VALUE_GROUPS
    }
    header = [("path", str(reader.path)), ("format", reader.format)]
    if manifest is not None:
        header += [
            ("tag", tag),
            ("step", "" if manifest.step is None else str(manifest.step)),
            ("saved", format_time(manifest.time)),
            ("metrics", format_metrics(metrics)),
        ]
    size = format_size(sum(info.nbytes for info in tensors.values()))
    header += [("size", f"{size} in {format_count(len(tensors), 'tensor')}")]
    groups = [
        (
            f"{group} (in values)" if group in VALUE_GROUPS else group,
            f"{len(infos):,}",
            format_size(sum(info.nbytes for info in infos.values())),
        )
        for group, infos in sorted(reader.groups.items())
    ]
    rows = [
        (
            entry.name,
            entry.info.dtype,
            str(list(entry.info.value_shape)) + (f" x {entry.count:,}" if entry.count > 1 else ""),
            format_size(entry.nbytes),
        )
        for entry in fold_tensors(tensors)
    ]
    return build_html(
        "Checkpoint",
        [
            HtmlTable((), [(name, text) for name, text in header if text]),
            HtmlTable(("group", "tensors", "bytes"), groups, frozenset({1, 2}), "group"),
            HtmlTable(("tensor", "dtype", "shape", "bytes"), rows, frozenset({3})),
        ],
        describe_unread(reader),
    )
