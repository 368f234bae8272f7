"""The values of an engine that are not tensors of the model or the optimizer, as DeepSpeed's files name them.

:mod:`rankless.deepspeed.engine_calls` collects on each rank before a save, and restores on each rank after a load. The
keys are those in DeepSpeed's files: checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankless.errors import InvalidArgumentError, MismatchError
from rankless.load.restore_result import RestoreResult
from rankless.observe.warning import warn_caller

_STEPS, _SAMPLES, _SKIPPED = "global_steps", "global_samples", "skipped_steps"
_SCALER, _SCHEDULER = "loss_scaler", "lr_scheduler"

#: The keys of the engine's values in the user content.
ENGINE_KEYS = frozenset({_STEPS, _SAMPLES, _SKIPPED, _SCALER, _SCHEDULER})

#: Further values that checkpoints of DeepSpeed itself have. They describe the job that saved, and are not restored.
_SOURCE_KEYS = frozenset(
    {
        *("dp_world_size", "mp_world_size", "dynamic_loss_scale", "overflow", "clip_grad", "ds_config", "ds_version"),
        *("checkpoint_parallel_dimensions",),
    }
)

#: The state of DeepSpeed's own schedulers, which torch's cannot load.
_COUNTER = frozenset({"last_batch_iteration"})

#: The attributes that a loss scaler changes in a training; all others are configuration.
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class EngineContent:
    """The values to save: values of all ranks, and a scheduler of torch, which is a component of its own."""

    user_content: dict[str, Any]
    scheduler: Any


def collect_values(engine: Any, client_state: Mapping[str, Any]) -> EngineContent:
    """Return the values of an engine.

    Raises ``InvalidArgumentError`` if the client state is no dict, or has one of their keys.
    """
    if not isinstance(client_state, Mapping):
        raise InvalidArgumentError(f"client_state must be a dict, such as {{'epoch': 3}}; got {client_state!r:.80}")
    taken = sorted((ENGINE_KEYS | _SOURCE_KEYS) & client_state.keys())
    if taken:
        raise InvalidArgumentError(
            f"client_state has {taken[0]!r}, which is the key of a value of the engine: use another key"
        )
    content: dict[str, Any] = {
        _STEPS: engine.global_steps,
        _SAMPLES: engine.global_samples,
        _SKIPPED: engine.skipped_steps,
    }
    scaler = find_scaler(engine)
    if scaler is not None:
        content[_SCALER] = dict(vars(scaler))
    component = as_component(engine.lr_scheduler)
    if component is not engine.lr_scheduler:
        content[_SCHEDULER] = engine.lr_scheduler.state_dict()
    return EngineContent({**content, **client_state}, component)


def as_component(scheduler: Any) -> Any:
    """Return a scheduler of torch, and ``None`` for one of DeepSpeed's own: its state is among the values."""
    return None if scheduler is not None and scheduler.state_dict().keys() == _COUNTER else scheduler


def find_scaler(engine: Any) -> Any:
    """Return the loss scaler of a training in fp16, or ``None``: other dtypes need none."""
    if not engine.fp16_enabled():
        return None
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)


def separate_client_state(content: Any) -> dict[str, Any]:
    """Return the client state in the user content of a checkpoint of any origin."""
    if not isinstance(content, Mapping):
        return {} if content is None else {"user_content": content}
    return {key: value for key, value in content.items() if key not in ENGINE_KEYS | _SOURCE_KEYS}


def restore_values(engine: Any, result: RestoreResult, scheduler: Any) -> None:
    """Give an engine the values of the checkpoint that was loaded.

    Raises ``MismatchError`` if the checkpoint has no state of ``scheduler``, or of another kind of loss scaler.
    """
    content = result.user_content if isinstance(result.user_content, Mapping) else {}
    if scheduler is not None and (as_component(scheduler) is None or "scheduler" in result.missing):
        state = content.get(_SCHEDULER)
        if state is None:
            raise MismatchError(
                f"{result.path} has no state of a scheduler, which the engine has; the weights are loaded. Pass "
                "load_lr_scheduler_states=False to keep the engine's"
            )
        scheduler.load_state_dict(state)
    _restore_scaler(find_scaler(engine), content.get(_SCALER), result)
    steps = content.get(_STEPS, result.step)
    if steps is not None:
        engine.global_steps = int(steps)
        engine.skipped_steps = int(content.get(_SKIPPED, 0))
        engine.global_samples = int(content.get(_SAMPLES, engine.global_steps * engine.train_batch_size()))


def _restore_scaler(scaler: Any, saved: Any, result: RestoreResult) -> None:
    if scaler is None:
        return
    if not isinstance(saved, Mapping):
        warn_caller(f"{result.path} has no loss scaler, as it is not of a training in fp16: the engine's starts anew")
        return
    if _is_dynamic(saved) != _is_dynamic(vars(scaler)):
        raise MismatchError(
            f"{result.path} has a {'dynamic' if _is_dynamic(saved) else 'static'} loss scale, and the engine has not; "
            "the weights are loaded. Configure fp16 as when it was saved"
        )
    for name in _SCALER_STATE:
        if name in saved and hasattr(scaler, name):
            setattr(scaler, name, saved[name])


def _is_dynamic(scaler: Mapping[str, Any]) -> bool:
    return bool(scaler.get("dynamic", scaler.get("dynamic_loss_scale", False)))
