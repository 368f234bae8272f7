"""A checkpoint that a ``Trainer`` resumes from, as the dict that Lightning hands to hooks and callbacks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.conversion.state_dict_schemas import lightning_schema, scheduler_state_dict
from holdfast.formats.reader import Reader
from holdfast.lightning.lazy_state import LazyStateDict, StoredModelState
from holdfast.run.catalog import open_latest
from holdfast.view import Checkpoint


@dataclass(frozen=True)
class ResumedCheckpoint:
    """What is in it: the model and the optimizers, which are read where they are needed, and ``content``, all else."""

    reader: Reader
    model: StoredModelState
    optimizers: tuple[LazyStateDict, ...]
    content: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> ResumedCheckpoint:
        """Open a checkpoint of any format. Raises as :func:`holdfast.open` does."""
        reader = open_latest(path)
        view = Checkpoint(reader)
        values = view.values
        return cls(
            reader, StoredModelState(reader, dict(values.get("model", {}))), _optimizers(view, values), _rest(values)
        )

    @property
    def path(self) -> Path:
        """The folder or file."""
        return self.reader.path

    def afresh(self) -> ResumedCheckpoint:
        """The same without what hooks have read of the model: they keep that no longer than Lightning does."""
        return replace(self, model=StoredModelState(self.reader, {}))

    def contents(self) -> dict[str, Any]:
        """The dict. What hooks leave of it says what is loaded."""
        found: dict[str, Any] = {**self.content, "state_dict": self.model}
        if self.optimizers:
            found["optimizer_states"] = list(self.optimizers)
        return found


def _optimizers(view: Checkpoint, values: dict[str, Any]) -> tuple[LazyStateDict, ...]:
    """The states of each optimizer, as ``Optimizer.state_dict`` gives them."""

    @cache
    def states() -> list[dict[str, Any]]:
        names = [key.removeprefix("optimizer/") for key in view if key.startswith("optimizer/")]
        tensors = {name: view[f"optimizer/{name}"] for name in names}
        return lightning_schema({"model": {}, "optimizer": tensors}, values)["optimizer_states"]  # type: ignore[no-any-return]

    groups = values["optimizer"]["groups"] if "optimizer" in values else []
    count = sum(number == 0 or group["number"] == 0 for number, group in enumerate(groups))
    return tuple(LazyStateDict(lambda number=number: states()[number]) for number in range(count))  # type: ignore[misc]


def _rest(values: dict[str, Any]) -> dict[str, Any]:
    """What Lightning asks of a checkpoint beside these: its own values, and the states of schedulers.

    A checkpoint that has schedulers, if only an empty list of them, is not one of weights alone; where no optimizer is
    in it there was none.
    """
    content = dict(values.get("user_content") or {})
    if "scheduler" in values:
        states = scheduler_state_dict(values["scheduler"])
        content["lr_schedulers"] = states if isinstance(states, list) else [states]
    if "lr_schedulers" in content and "optimizer" not in values:
        content.setdefault("optimizer_states", [])
    return content
