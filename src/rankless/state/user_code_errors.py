"""Errors of code of the user's objects that a load runs, such as their ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rankless.errors import RanklessError, StateError


@contextmanager
def loading_code(owner: object, component: str) -> Iterator[None]:
    """Raise ``StateError`` with the class of ``owner`` if its code fails: its values were replaced already.

    Errors of rankless pass. Whatever puts values in place runs the code inside of it, in a vote, so that all ranks
    raise.
    """
    try:
        yield
    except RanklessError:
        raise
    except Exception as error:
        raise StateError(
            f"code of {type(owner).__qualname__} that runs in load_state_dict failed after values were changed, and "
            f"the {component} may be partly loaded: do not use it. {type(error).__name__}: {error}"
        ) from error
