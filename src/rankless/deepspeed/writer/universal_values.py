"""The values of DeepSpeed's engine in a checkpoint of any format: counters, loss scaler, scheduler, client state.

:class:`~rankless.deepspeed.writer.universal_target.UniversalTarget` collects them when it is made, on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankless.conversion.state_dict_schemas import scheduler_state_dict
from rankless.conversion.target import ConversionSource
from rankless.errors import InvalidArgumentError
from rankless.formats.torchfile.pickler import PickledGlobal, PickledObject

#: The end of the tag of a universal checkpoint.
TAG_SUFFIX = "_universal"

#: Counters that the engine reads, with their values in checkpoints that do not have them.
_COUNTERS = {"global_steps": 0, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}

#: Values of the optimizer, which are in the file of the optimizer.
_OPTIMIZER_VALUES = ("dynamic_loss_scale", "overflow", "clip_grad")

_SCALER, _SCHEDULER, _VERSION = "loss_scaler", "lr_scheduler", "ds_version"

#: The version that the format is written for, if the source names none.
_FORMAT_VERSION = "0.19.8"

#: Keys that the format has for itself.
_RESERVED = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "data_sampler", "random_ltd", "universal_checkpoint_info"),
    }
)

_SCALER_MODULE = "deepspeed.runtime.fp16.loss_scaler"

#: The attributes without which DeepSpeed's scalers do not work.
_SCALER_ATTRIBUTES = {
    False: frozenset({"cur_scale", "dynamic"}),
    True: frozenset(
        {
            *("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale", "dynamic"),
            *("delayed_shift", "cur_hysteresis", "consecutive_hysteresis", "raise_error_at_min_scale", "dtype"),
        }
    ),
}


@dataclass(frozen=True)
class EngineValues:
    """The values of an engine.

    Attributes:
        counters: The counters that the engine needs, by name.
        scheduler: The state of the scheduler, or ``None``.
        optimizer: The values in the file of the optimizer.
        client: All other values, which ``load_checkpoint`` returns as the client state.
        version: The version of DeepSpeed.
    """

    counters: Mapping[str, int]
    scheduler: Any
    optimizer: Mapping[str, Any]
    client: Mapping[str, Any]
    version: str

    @classmethod
    def from_source(cls, source: ConversionSource, values: Mapping[str, Any], steps: int | None) -> EngineValues:
        """Collect the values. ``steps`` are the optimizer's, for sources that name no other.

        Raises ``InvalidArgumentError`` for values that have no place.
        """
        content = values.get("user_content")
        client = dict(content) if isinstance(content, dict) else {} if content is None else {"user_content": content}
        reserved = sorted(_RESERVED & client.keys())
        if reserved:
            raise InvalidArgumentError(
                f"user_content has {reserved[0]!r}, which is a key of DeepSpeed: save it under another key"
            )
        wrong = next((name for name in _COUNTERS if name in client and type(client[name]) is not int), None)
        if wrong is not None:
            raise InvalidArgumentError(
                f"user_content has {wrong!r}, a counter of DeepSpeed, with {client[wrong]!r:.40}: save it under "
                "another key"
            )
        counters = {**_COUNTERS, "global_steps": _find_step(source, steps)}
        counters |= {name: client.pop(name) for name in _COUNTERS if name in client}
        counters["mp_world_size"] = 1  # tensor-parallel ranks and stages of the source are joined
        optimizer = {key: client.pop(key) for key in _OPTIMIZER_VALUES if key in client}
        if _is_scaler(client.get(_SCALER)):
            optimizer[_SCALER] = _as_object(client.pop(_SCALER))
        scheduler = client.pop(_SCHEDULER, None)
        if "scheduler" in values:
            scheduler = scheduler_state_dict(values["scheduler"])
            if isinstance(scheduler, list):
                raise InvalidArgumentError(f"DeepSpeed has one scheduler, but the source has {len(scheduler)}")
        stateful = values.get("stateful")
        if stateful:
            client["stateful"] = stateful
        version = client.pop(_VERSION, None)
        return cls(counters, scheduler, optimizer, client, version if isinstance(version, str) else _FORMAT_VERSION)


def _find_step(source: ConversionSource, steps: int | None) -> int:
    """Return the training step: the one that the checkpoint names, else the steps of the optimizer."""
    return int(source.step if source.step is not None else steps or 0)


def _is_scaler(value: Any) -> bool:
    """Return whether a value has the attributes of one of DeepSpeed's loss scalers."""
    return isinstance(value, dict) and value.keys() >= _SCALER_ATTRIBUTES[bool(value.get("dynamic"))]


def _as_object(attributes: Mapping[str, Any]) -> PickledObject:
    """Return a loss scaler as DeepSpeed pickles it."""
    name = "DynamicLossScaler" if attributes["dynamic"] else "LossScaler"
    return PickledObject(PickledGlobal(_SCALER_MODULE, name), attributes)
