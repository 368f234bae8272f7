"""Tests that the guide's examples run as they are written, one after another."""

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
import transformers

import rankless
from tests.helpers.pool import Ranks

GUIDE = Path(__file__).parents[3] / "docs/booster.md"


def llama() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
    )


def follow(folder: str) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(huggingface_hub, "snapshot_download", lambda _: f"{folder}/out/hf")
        model = llama()
        optimizer = torch.optim.AdamW(model.named_parameters())
        model(torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()
        optimizer.step()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        names: dict[str, Any] = {"rankless": rankless, "torch": torch}
        names |= {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
        assert len(blocks) == 3
        for block in blocks:
            if "Booster" in block:
                names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 3)
            exec(block, names)  # noqa: S102 - it is our guide
            dist.barrier()
        return names["model"](torch.arange(4)[None]).logits.detach() - model(torch.arange(4)[None]).logits.detach()


def test_its_examples_run(ranks: Ranks, tmp_path: Path) -> None:
    for difference in ranks(2, follow, str(tmp_path)):
        torch.testing.assert_close(difference, torch.zeros_like(difference))
