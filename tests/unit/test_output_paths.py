"""Tests of the paths that conversions and exports refuse before they do any work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import rankless
from rankless.errors import TagExistsError


@pytest.mark.parametrize(
    "write",
    [
        lambda source, output, **options: rankless.convert(source, output, to="hf", **options),
        lambda source, output, **options: rankless.export_model(source.parent, output, **options),
    ],
)
def test_a_link_that_leads_nowhere_is_taken(write: Callable[..., Any], tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "a", nn.Linear(2, 2))
    (tmp_path / "link").symlink_to("nowhere")
    events: list[Any] = []
    with pytest.raises(TagExistsError, match="exists already"):
        write(tmp_path / "run" / "a", tmp_path / "link", on_event=events.append)
    assert not events
    assert (tmp_path / "link").is_symlink()
