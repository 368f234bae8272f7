"""The options of a conversion to Megatron.

:mod:`rankless.megatron.writer.megatron_source` makes them on each rank, from the arguments of :func:`rankless.convert`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rankless.errors import InvalidArgumentError

#: The largest number of samples, and the largest divisor.
_LARGEST = 2**53


@dataclass(frozen=True)
class MegatronOptions:
    """The settings that a source does not have.

    Attributes:
        config: The path of a ``config.json``, or of a folder with one. Default: the source's.
        vocab_divisible_by: The embedding gets rows of zeros until their number is a multiple of this: for example,
            50257 rows become 50304 with 128.
        consumed_samples: The number of samples that the training has consumed, where Megatron's schedule and data go
            on. Default: the number in the source, or 0.
        expert_parallel: Whether experts get parameter groups of their own, as in a training with expert parallelism.
    """

    config: str | None = None
    vocab_divisible_by: int = 1
    consumed_samples: int | None = None
    expert_parallel: bool = False

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> MegatronOptions:
        """Return the options. Raises ``InvalidArgumentError`` if one is unknown or not valid."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise InvalidArgumentError(
                f"the format 'megatron' has no options {', '.join(unknown)}: it has {', '.join(known)}"
            )
        options = cls(**given)
        _check_number("vocab_divisible_by", options.vocab_divisible_by, 1)
        if options.consumed_samples is not None:
            _check_number("consumed_samples", options.consumed_samples, 0)
        if not isinstance(options.expert_parallel, bool):
            raise InvalidArgumentError(f"expert_parallel must be True or False; got {options.expert_parallel!r:.40}")
        return options


def _check_number(name: str, value: object, least: int) -> None:
    if type(value) is not int or not least <= value <= _LARGEST:
        raise InvalidArgumentError(f"{name} must be a whole number of at least {least}; got {value!r:.40}")
