"""A model that is saved with other entries than its own state dict has.

:mod:`rankless.lightning.dumped_state` passes such models to saves, on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import nn


class ReplacedModel(msgspec.Struct, frozen=True):
    """A model with ``entries`` in place of its state dict. ``module`` provides the names of an optimizer's parameters.

    Entries under the name of a buffer may differ by rank, as buffers may.
    """

    module: nn.Module
    entries: Mapping[str, Any]
