"""The checkpoint that a ``Trainer`` resumes from, as the dict that Lightning passes to hooks and callbacks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rankless.conversion.state_dict_schemas import lightning_schema, scheduler_state_dict
from rankless.formats.reader import Reader
from rankless.lightning.lazy_state import LazyStateDict, StoredModelState
from rankless.run.lookup import open_latest
from rankless.view import Checkpoint


@dataclass(frozen=True)
class ResumedCheckpoint:
    """An open checkpoint.

    The model and the optimizers are read when they are needed; ``content`` holds everything else.
    """

    reader: Reader
    model: StoredModelState
    optimizers: tuple[LazyStateDict, ...]
    content: dict[str, Any]

    @classmethod
    def open_path(cls, path: Path) -> ResumedCheckpoint:
        """Open a checkpoint of any format. Raises as :func:`rankless.open` does."""
        reader = open_latest(path)
        view = Checkpoint(reader)
        values = view.values
        return cls(
            reader,
            StoredModelState(reader, dict(values.get("model", {}))),
            _lazy_optimizer_states(view, values),
            _lightning_content(values),
        )

    @property
    def path(self) -> Path:
        """The checkpoint's folder or file."""
        return self.reader.path

    def with_unread_model(self) -> ResumedCheckpoint:
        """Return a copy without the tensors that hooks have read, so that their memory is freed as in Lightning."""
        return replace(self, model=StoredModelState(self.reader, {}))

    def to_dict(self) -> dict[str, Any]:
        """Return the checkpoint as a dict. What hooks leave in it determines what is loaded."""
        checkpoint: dict[str, Any] = {**self.content, "state_dict": self.model}
        if self.optimizers:
            checkpoint["optimizer_states"] = list(self.optimizers)
        return checkpoint


def _lazy_optimizer_states(view: Checkpoint, values: dict[str, Any]) -> tuple[LazyStateDict, ...]:
    """Return the state of each optimizer in the format of ``Optimizer.state_dict``, read when it is first used."""

    @cache
    def read_states() -> list[dict[str, Any]]:
        names = [key.removeprefix("optimizer/") for key in view if key.startswith("optimizer/")]
        tensors = {name: view[f"optimizer/{name}"] for name in names}
        return lightning_schema({"model": {}, "optimizer": tensors}, values)["optimizer_states"]  # type: ignore[no-any-return]

    groups = values["optimizer"]["groups"] if "optimizer" in values else []
    n_optimizers = sum(number == 0 or group["number"] == 0 for number, group in enumerate(groups))
    return tuple(LazyStateDict(lambda number=number: read_states()[number]) for number in range(n_optimizers))  # type: ignore[misc]


def _lightning_content(values: dict[str, Any]) -> dict[str, Any]:
    """Return what Lightning expects in a checkpoint besides these: its own values, and the states of schedulers.

    Lightning takes a checkpoint with schedulers, even an empty list of them, for more than weights alone. So if such a
    checkpoint has no optimizer, an empty list of optimizer states is added.
    """
    content = dict(values.get("user_content") or {})
    if "scheduler" in values:
        states = scheduler_state_dict(values["scheduler"])
        content["lr_schedulers"] = states if isinstance(states, list) else [states]
    if "lr_schedulers" in content and "optimizer" not in values:
        content.setdefault("optimizer_states", [])
    return content
