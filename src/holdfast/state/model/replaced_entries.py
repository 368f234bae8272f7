"""A model that is saved with other entries than its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ReplacedModel:
    """``entries`` are saved as the state dict of ``module``, which tells the names of an optimizer's parameters.

    Entries under the name of a buffer may differ by rank, as buffers may.
    """

    module: nn.Module
    entries: Mapping[str, Any]
