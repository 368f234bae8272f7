"""The arguments of the training that the reader needs, from the ``args`` that Megatron saves.

The reader and the writer ask it, on each rank. A missing argument must be an error where it is needed, and not before.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankless.errors import FormatError

#: The largest number of heads, of features and of entries of a vocabulary.
_LARGEST = 2**31

#: Advice for a checkpoint that no family has.
READ_ADVICE = 'keep Megatron\'s names with keys={"layout": "megatron"}, on the command line --layout megatron'


@dataclass(frozen=True)
class ModelArgs:
    """The arguments of a training: ``values`` by name; ``source`` is the file or folder, for messages.

    ``advice`` ends the message of an error about tensors or arguments that have no place in a family. ``problem`` says
    why there are no arguments, if a file with them could not be read.
    """

    values: Mapping[str, Any]
    source: str
    advice: str = READ_ADVICE
    problem: str = ""

    @classmethod
    def from_saved(cls, saved: Any, source: str) -> ModelArgs:
        """Return the arguments that a checkpoint has; none if it has none."""
        values = vars(saved) if isinstance(saved, Namespace) else saved
        return cls(values if isinstance(values, dict) else {}, source)

    def is_set(self, name: str) -> bool:
        """Return whether an argument is there and true."""
        return bool(self.values.get(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or the default if it is missing or ``None``."""
        value = self.values.get(name)
        return default if value is None else value

    def require_size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer. Raises ``FormatError`` if the argument is missing or is something else."""
        value = self.get(name, default)
        if type(value) is not int or not 0 < value < _LARGEST:
            raise FormatError(
                f"{self.source}: args must have {name} as a positive integer to divide the tensors, not {value!r:.40}; "
                f"{self.advice}"
            )
        return value

    @property
    def is_gated(self) -> bool:
        """True if ``linear_fc1`` consists of a gate and a projection."""
        return any(self.is_set(name) for name in ("swiglu", "gated_linear_unit", "quick_geglu"))
