"""What reading a checkpoint may cost: steps that bytes of input earn, and that what is made of them spends.

A few bytes can ask for a lot of work: a list that names one list again and again, keys that all have one hash. All who
make something of the input spend from one budget, so that such input is refused before it costs time or memory.
"""

from __future__ import annotations

from holdfast.errors import ReadBudgetError

#: Steps for each byte of input, and steps that every checkpoint has. Honest input needs at most about 3.5 for a byte.
_STEPS, _LEAST = 4, 2**19

#: How much memory costs as much as one step, in bytes. In time, a step is about a quarter of a microsecond.
MEMORY_FACTOR = 16


class ReadBudget:
    """The steps of one checkpoint: ``left`` of them, beside those ``spent``; ``earned`` by so many bytes of input."""

    def __init__(self, nbytes: int = 0, least: int = _LEAST) -> None:
        self.earned = self.spent = 0
        self.left = least
        self.earn(nbytes)

    def earn(self, nbytes: int) -> None:
        """Add the steps of further bytes of input."""
        self.earned += nbytes
        self.left += _STEPS * nbytes

    def spend(self, steps: int = 1) -> None:
        """Take some steps. Raises ``ReadBudgetError`` if there are not enough."""
        self.left -= steps
        self.spent += steps
        if self.left < 0:
            raise ReadBudgetError("its values name each other again and again: there is more in them than in the file")

    def spend_memory(self, nbytes: int) -> None:
        """Take the steps that so much memory costs. Raises ``ReadBudgetError`` if there are not enough."""
        self.spend(-(-nbytes // MEMORY_FACTOR))
