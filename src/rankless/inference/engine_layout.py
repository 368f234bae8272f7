"""The layout of an inference engine: its ranks divide a model.

``rankless show --for vllm`` passes it to :mod:`rankless.vllm.lone_rank`, in one process.
"""

from __future__ import annotations

from typing import NamedTuple


class EngineLayout(NamedTuple):
    """The number of ranks that divide each tensor, the number of pipeline stages, and whether experts are divided."""

    tensor: int = 1
    pipeline: int = 1
    has_expert_parallelism: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        parts = [f"tensor parallelism {self.tensor}", f"pipeline parallelism {self.pipeline}"]
        return ", ".join([*parts, *(["expert parallelism"] if self.has_expert_parallelism else [])])
