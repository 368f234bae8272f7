"""The number of examples of hypothesis tests: many in ``make test-all``, a sixth of them in ``make test``."""

from __future__ import annotations

from hypothesis import settings

#: The names of the profiles that ``tests/conftest.py`` loads: for ``make test``, and with ``--full``.
DAY, ALL = "day", "all"


def examples(count: int, least: int = 20) -> int:
    """Return ``count`` in ``make test-all``, and otherwise a sixth of it, but at least 20 or, of slow ones, fewer."""
    if settings.get_current_profile_name() == ALL:
        return count
    return min(count, max(least, count // 6))
