"""A limit on the work of reading an untrusted checkpoint, in proportion to its size.

A few bytes can cause a lot of work: a list that contains one list many times, or keys that all have one hash. Bytes of
input add units to a budget, and all code that decodes the input takes units from it. So such input is refused before it
costs much time or memory.

Each open checkpoint has one, on each rank that reads it; readers of other formats pass it through all they call.
:data:`MEMORY_FACTOR` and the units must not depend on the machine: all ranks must accept or refuse the same file.
"""

from __future__ import annotations

from rankless.errors import ReadBudgetError

#: The units that each byte of input adds, and the units of an empty checkpoint. Ordinary input needs up to 3.5 a byte.
_UNITS_PER_BYTE, _MIN_UNITS = 4, 2**19

#: The bytes of memory that cost one unit. In time, a unit is about a quarter of a microsecond.
MEMORY_FACTOR = 16


class ReadBudget:
    """The units that reading one checkpoint may take: ``left`` and ``spent`` ones, for ``earned`` bytes of input."""

    def __init__(self, nbytes: int = 0, least: int = _MIN_UNITS) -> None:
        self.earned = self.spent = 0
        self.left = least
        self.earn(nbytes)

    def earn(self, nbytes: int) -> None:
        """Add the units for further bytes of input."""
        self.earned += nbytes
        self.left += _UNITS_PER_BYTE * nbytes

    def spend(self, units: int = 1) -> None:
        """Take some units. Raises ``ReadBudgetError`` if there are not enough."""
        self.left -= units
        self.spent += units
        if self.left < 0:
            raise ReadBudgetError(
                "its values refer to each other too often: reading them takes more work than its size allows"
            )

    def spend_memory(self, nbytes: int) -> None:
        """Take the units that ``nbytes`` of memory cost. Raises ``ReadBudgetError`` if there are not enough."""
        self.spend(-(-nbytes // MEMORY_FACTOR))
