"""The checkpoint that a ``Trainer`` resumes from, as the dict that Lightning passes to hooks and callbacks.

:class:`~rankless.lightning.checkpoints.LightningCheckpoints` opens it on every rank, in the vote "opening the
checkpoint"; :mod:`rankless.lightning.from_checkpoint` in one process. :mod:`rankless.lightning.load_state` loads from
its path. The keys of the dict are Lightning's, and users' hooks read them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rankless.conversion.state_dict_schemas import lightning_schema, scheduler_state_dict
from rankless.formats.reader import Reader
from rankless.formats.torch_file import LIGHTNING_VERSION
from rankless.lightning.hook_overrides import NotRead
from rankless.lightning.ordered_state import order_state
from rankless.run.lookup import open_latest
from rankless.view import Checkpoint


@dataclass(frozen=True)
class ResumedCheckpoint:
    """An open checkpoint.

    The model and the optimizers are read when they are needed; ``content`` holds everything else.
    """

    reader: Reader
    values: dict[str, Any]
    content: dict[str, Any]

    @classmethod
    def open_path(cls, path: Path) -> ResumedCheckpoint:
        """Open a checkpoint of any format. Raises as :func:`rankless.open` does."""
        reader = open_latest(path)
        values = Checkpoint(reader).values
        return cls(reader, values, _lightning_content(values))

    @property
    def path(self) -> Path:
        """The checkpoint's folder or file."""
        return self.reader.path

    @property
    def has_model(self) -> bool:
        """True if the checkpoint has a model."""
        return "model" in self.reader.groups or "model" in self.values

    @property
    def number_of_optimizers(self) -> int:
        """The number of optimizers in the checkpoint."""
        groups = self.values["optimizer"]["groups"] if "optimizer" in self.values else []
        return sum(number == 0 or group["number"] == 0 for number, group in enumerate(groups))

    def to_dict(self, module: nn.Module | None, *, read: bool) -> dict[str, Any]:
        """Return the checkpoint as a dict. With ``read``, hooks get it, and the values left in it are loaded.

        The model's state has the order of ``module``.

        A ``Trainer`` strategy calls it on each rank.
        """
        checkpoint = dict(self.content)
        if self.has_model:
            checkpoint["state_dict"] = self.read_model(module) if read else NotRead()
        if self.number_of_optimizers:
            checkpoint["optimizer_states"] = (
                self._read_optimizers() if read else [NotRead() for _ in range(self.number_of_optimizers)]
            )
        return checkpoint

    def read_model(self, module: nn.Module | None = None) -> OrderedDict[str, Any]:
        """Read the whole model. Names of tied tensors have one tensor."""
        tensors = self._read_group("model")
        tied = {name: tensors[stored] for name, stored in self.reader.tied.get("model", {}).items()}
        return order_state({**tensors, **tied, **self.values.get("model", {})}, module)

    def _read_optimizers(self) -> list[dict[str, Any]]:
        """Read the state of each optimizer in the format of ``Optimizer.state_dict``."""
        groups = {"model": {}, "optimizer": self._read_group("optimizer")}
        return lightning_schema(groups, {"optimizer": self.values["optimizer"]})["optimizer_states"]  # type: ignore[no-any-return]

    def _read_group(self, group: str) -> dict[str, Any]:
        view = Checkpoint(self.reader)
        return {name: view[f"{group}/{name}"] for name in self.reader.groups.get(group, {})}


def _lightning_content(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that Lightning expects in a checkpoint besides: its own values, and the states of schedulers.

    Lightning takes a checkpoint with schedulers, even an empty list of them, for more than weights alone. So if such a
    checkpoint has no optimizer, an empty list of optimizer states is added, unless Lightning has left it out.
    """
    content = dict(values.get("user_content") or {})
    if "scheduler" in values:
        states = scheduler_state_dict(values["scheduler"])
        content["lr_schedulers"] = states if isinstance(states, list) else [states]
    if "lr_schedulers" in content and "optimizer" not in values and LIGHTNING_VERSION not in content:
        content.setdefault("optimizer_states", [])
    return content
