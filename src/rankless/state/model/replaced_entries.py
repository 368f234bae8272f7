"""A model that is saved with other entries than those of its own state dict.

:mod:`rankless.lightning.dumped_state` passes such models to saves, on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import nn


class ReplacedModel(msgspec.Struct, frozen=True):
    """A model whose state dict is replaced by ``entries``. ``module`` provides the names of an optimizer's parameters.

    Entries under the name of a buffer may differ by rank, as buffers may.
    """

    module: nn.Module
    entries: Mapping[str, Any]
