"""The values of a checkpoint that are not tensors of the model or the optimizer: schedulers, counters, client state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankless.formats.deepspeed.model_file import ModelFile
from rankless.formats.deepspeed.pickled_classes import plain_attributes

#: The key of the scheduler in the files, and the state of DeepSpeed's own schedulers, which torch's cannot load.
_SCHEDULER, _COUNTER = "lr_scheduler", frozenset({"last_batch_iteration"})

#: The key of the list of schedulers that Lightning puts into the client state.
_LIGHTNING_SCHEDULERS = "lr_schedulers"


def scheduler_of(file: ModelFile) -> Any:
    """Return the state of the scheduler, or ``None`` if there is none, or if it is one of DeepSpeed's own."""
    if file.scheduler is None:
        return file.values.get(_LIGHTNING_SCHEDULERS) or None
    return None if _is_counter(file.scheduler) else file.scheduler


def user_content_of(file: ModelFile, optimizer_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters of DeepSpeed, the loss scaler and the client state.

    The client state has priority, as in DeepSpeed. A scheduler that is one of DeepSpeed's own is there, too.
    """
    values = {key: plain_attributes(value) for key, value in optimizer_values.items()}
    if _is_counter(file.scheduler):
        values[_SCHEDULER] = file.scheduler
    has_lightning = file.scheduler is None and bool(file.values.get(_LIGHTNING_SCHEDULERS))
    client = {key: value for key, value in file.values.items() if not (has_lightning and key == _LIGHTNING_SCHEDULERS)}
    return {**values, **client}


def _is_counter(scheduler: Any) -> bool:
    return isinstance(scheduler, dict) and scheduler.keys() == _COUNTER
