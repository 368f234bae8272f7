"""A run with every kind of state that can change during a save."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import rankless
from campaigns.torn.layouts import LAYOUTS, WIDTH, Net
from campaigns.torn.snapshot import LiveStateful, Snapshot, get_local


class ChangingTraining:
    """A run in one layout, which saves and changes its state."""

    def __init__(self, layout: str) -> None:
        torch.manual_seed(0)
        made = LAYOUTS[layout]
        self.model = made.wrap(Net())
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = made.optimizer([{"params": trained[:2]}, {"params": trained[2:], "lr": 0.01}], lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.9)
        self.tracker = LiveStateful()
        self.loader = LiveStateful()
        self.content: dict[str, Any] = {
            "step": 0,
            "nested": [[0], {"deep": [{"x": 0}], "set": {0}}],
            "ordered": OrderedDict(a=[0]),
            "bytes": bytearray(b"00"),
            "tensor": torch.zeros(3000),
            "scalar": torch.zeros((), dtype=torch.float64),
            "array": np.zeros((20, 30), np.int32),
        }
        self._train_step()

    def save_and_change(self, path: Path, step: int, staging: str) -> Iterator[str]:
        """Save asynchronously, change everything, and return the values that are not those at the call."""
        expected = Snapshot(self)
        rankless.save_checkpoint(
            path,
            f"step_{step}",
            self.model,
            self.optimizer,
            self.scheduler,
            self.content,
            dataloader=self.loader,
            stateful={"tracker": self.tracker},
            per_rank_content=self.content,
            async_save=True,
            staging=staging,
        )
        self._change_values(step)
        if staging == "eager":
            self._change_tensors(step)
        else:
            self._train_step()
        rankless.finalize()
        yield from (f"step {step}: {name}" for name in expected.find_differences(path / f"step_{step}"))
        _wait_for_all_ranks()
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(path / f"step_{step}")

    def _change_tensors(self, step: int) -> None:
        """Change each tensor in its own way, before and after an optimizer step."""
        with torch.no_grad():
            for tensor in self.model.parameters():
                get_local(tensor).add_(1)
            for states in self.optimizer.state.values():
                for value in states.values():
                    get_local(value).add_(1)
        self._train_step()
        if step % 3 == 0:
            self._move_states()

    def _change_values(self, step: int) -> None:
        """Change values, the deepest first, and tensors that belong to no optimizer."""
        content = self.content
        content["nested"][1]["deep"][0]["x"] += 1
        content["nested"][1]["set"].add(step)
        content["nested"][0].append(step)
        del content["nested"][0][:-5]
        content["ordered"]["a"][0] += 1
        content["bytes"][0] = step % 256
        kept = self.tracker.state, self.loader.state
        for tensor in (content["tensor"], content["scalar"], *(state["mean"] for state in kept), *self.model.buffers()):
            get_local(tensor).add_(1)
        for array in (content["array"], *(state["table"] for state in kept)):
            np.add(array, 1, out=array)
        self.tracker.state["counts"][0] += 1
        self.loader.state["counts"][1] += 1
        content["step"] = step + 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 1.01
            group["betas"] = (group["betas"][0], 0.5 + step % 7 / 100)
        torch.rand(3)

    def _train_step(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.model(torch.rand(4, WIDTH, generator=generator)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def _move_states(self) -> None:
        """Move states to new memory, and reuse their old memory."""
        for states in self.optimizer.state.values():
            for name, value in list(states.items()):
                states[name] = value.clone()
                get_local(value).fill_(-1)


def _wait_for_all_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()
