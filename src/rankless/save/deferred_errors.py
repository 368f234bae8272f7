"""Errors that are raised only after further work, such as the save of a last step.

:class:`rankless.Checkpointer`, :class:`~rankless.run_directory.RunDirectory` and integrations collect with it on each
rank, in the thread of the caller. All ranks collect the same errors in the same order, as all saves raise them on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rankless.errors import RankTimeoutError
from rankless.observe.warning import warn_caller


class DeferredErrors:
    """The errors of saves and drains, for later saves and ``finalize()``: the first one is raised in the end."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    @property
    def is_rank_missing(self) -> bool:
        """True if a rank did not come: a step that needs it may wait for the whole timeout again."""
        return any(isinstance(error, RankTimeoutError) for error in self._errors)

    def run(self, function: Callable[[], object]) -> bool:
        """Call a function. Collect its error, and return whether there was none."""
        try:
            function()
        except Exception as error:  # noqa: BLE001 - raised later
            self._errors.append(error)
            return False
        return True

    def run_until_success(self, function: Callable[[], object]) -> None:
        """Call a function that raises one error at a time, until there are no more. Collect all of them."""
        while not self.run(function):
            pass

    @contextmanager
    def raised_after(self, *notes: str) -> Iterator[None]:
        """Run a block, such as a save, then raise the first error with notes. An error of the block names all.

        If a rank is missing, which the block would wait for again, the first error is raised at once.
        """
        if self.is_rank_missing:
            self.raise_first()
        try:
            yield
        except BaseException as error:
            self.note_in(error)
            raise
        self.raise_first(*notes)

    def add_note(self, note: str) -> None:
        """Add a note to the first error, if there is one."""
        if self._errors:
            self._errors[0].add_note(note)

    def warn_of(self, kind: type[Exception]) -> None:
        """Warn of the errors of one kind, which are not raised then."""
        for error in self._errors:
            if isinstance(error, kind):
                warn_caller(f"a save has failed: {error}")
        self._errors = [error for error in self._errors if not isinstance(error, kind)]

    def note_in(self, error: BaseException) -> None:
        """Add all errors to another one, which the caller sees instead of them."""
        for failure in self._errors:
            if failure is not error:
                error.add_note(f"a save has failed, too: {failure!r}")

    def raise_first(self, *notes: str) -> None:
        """Raise the first error, which names the others and has the notes. Return if there is none."""
        if not self._errors:
            return
        self.note_in(self._errors[0])
        for note in notes:
            self.add_note(note)
        raise self._errors[0]
