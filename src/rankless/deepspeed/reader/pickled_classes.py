"""The classes of DeepSpeed in its pickles, as placeholders: nothing of DeepSpeed is imported or called.

:mod:`rankless.deepspeed.reader.file_access` opens pickles with the allow-list, on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankless.formats.pickles.builtin_types import plain_record
from rankless.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from rankless.formats.torchfile.allowed_globals import NAMES
from rankless.ondisk.read_budget import ReadBudget

_RECORDS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.bf16_optimizer.fragment_address",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)

_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"


def _make_stage(_: ReadBudget, number: Any) -> int:
    if type(number) is not int:
        raise TypeError("a stage of ZeRO must be an integer")
    return number


#: The globals that DeepSpeed's files may name. A stage of ZeRO is read as its number.
ALLOWED: Mapping[str, object] = {
    **NAMES,
    **{name: AllowedCallable(name, plain_record(name)) for name in _RECORDS},
    _STAGE: AllowedCallable(_STAGE, _make_stage),
}


def plain_attributes(value: Any) -> Any:
    """Return the attributes of an object of one of DeepSpeed's classes as a dict; any other value as it is."""
    return value.state if isinstance(value, OpaqueObject) and value.name in _RECORDS else value
