"""Objects with a state of their own, which is neither a model nor an optimizer."""

from __future__ import annotations


class Counter:
    """Anything with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]
