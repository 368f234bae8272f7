"""A mixin for classes that are closed at the end of a ``with`` block.

Readers, writers and their pools, watches, loaders and followers of weights inherit from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class ClosingMixin(ABC):
    """A context manager that calls :meth:`close` at its end."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
