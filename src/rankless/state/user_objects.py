"""Objects of the user with ``state_dict`` and ``load_state_dict``: checks of them, and errors of their code.

They are loss scalers, averages of weights and data loaders.

Captures and restores call it on each rank, in votes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rankless.engine.comm.vote import describe_error
from rankless.errors import InvalidArgumentError, RanklessError, StateError
from rankless.ondisk.validation import check_utf8


def check_stateful(stateful: object) -> Mapping[str, Any]:
    """Return a dict of objects that have a state. Raises ``InvalidArgumentError`` for anything else."""
    if not isinstance(stateful, Mapping) or not all(isinstance(name, str) for name in stateful):
        raise InvalidArgumentError(
            "stateful must be a dict of objects by name, such as {'scaler': scaler}; got "
            f"{type(stateful).__qualname__}"
        )
    for name, candidate in stateful.items():
        if getattr(candidate, "needs_all_states", False):
            raise InvalidArgumentError(
                f"stateful object {name!r} is a data loader, and each rank has a position of its own: pass it as "
                "dataloader=, several as dataloader={'a': ..., 'b': ...}"
            )
    return {
        check_utf8(name, "a name in stateful"): check_stateful_object(candidate, f"stateful object {name!r}")
        for name, candidate in stateful.items()
    }


#: Advice in messages, by subject: an object to pass instead.
_ADVICE = {"the data loader": ": pass a rankless.ResumableLoader, or a StatefulDataLoader of torchdata"}


def check_stateful_object(candidate: Any, subject: str) -> Any:
    """Return an object that has a state. Raises ``InvalidArgumentError``, which names ``subject``, if it has none."""
    if not hasattr(candidate, "state_dict") or not hasattr(candidate, "load_state_dict"):
        raise InvalidArgumentError(
            f"{subject} must have state_dict() and load_state_dict(); {type(candidate).__qualname__} lacks them"
            f"{_ADVICE.get(subject, '')}"
        )
    return candidate


def read_state(owner: Any) -> Any:
    """Return ``owner.state_dict()``. Raises ``StateError`` with the class of ``owner`` if its code fails.

    Saves call it, in a vote, so that all ranks raise.
    """
    try:
        return owner.state_dict()
    except RanklessError:
        raise
    except Exception as error:
        raise StateError(
            f"code of {type(owner).__qualname__} that runs in state_dict failed: {describe_error(error)}"
        ) from error


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
            f"the {component} may be partly loaded: do not use it. {describe_error(error)}"
        ) from error
