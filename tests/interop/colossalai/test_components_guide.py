"""Tests that the examples of two pages run on two ranks, one after another, and that the large model is loaded."""

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist

from tests.helpers.pool import Ranks

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS / "components.md", DOCS / "migrating/colossalai.md")


def follow(folder: str) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(huggingface_hub, "snapshot_download", lambda _: f"{folder}/out/hf")
        names: dict[str, Any] = {}
        logits = []
        for page, count in zip(PAGES, (2, 3), strict=True):
            blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
            assert len(blocks) == count
            for block in blocks:
                torch.manual_seed(0)  # equal replicas
                exec(block, names)  # noqa: S102 - it is our guide
                dist.barrier()
                if page.stem == "components":
                    logits.append(names["model"](torch.arange(4)[None]).logits.detach())
        return logits[1] - logits[0]


def test_its_examples_run(ranks: Ranks, tmp_path: Path) -> None:
    for difference in ranks(2, follow, str(tmp_path)):
        torch.testing.assert_close(difference, torch.zeros_like(difference))
