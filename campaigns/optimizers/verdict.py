"""The verdicts of the campaign on an optimizer in a layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EXACT = "exact"
#: ``RestoreResult`` says that the optimizer is not exact.
REPORTED = "reported"
#: A typed error says which state or optimizer cannot be saved or loaded.
REFUSED = "refused"
#: torch or the package raises without rankless, or does not restore the optimizer by its own state dict.
FAILS_BY_ITSELF = "fails by itself"
#: An error that is no ``RanklessError``, or steps that fail after a load.
WRONG = "WRONG"
#: ``RestoreResult.exact`` has the optimizer, and a value differs.
SILENT = "SILENT"

#: From the best to the worst.
KINDS = (EXACT, FAILS_BY_ITSELF, REPORTED, REFUSED, WRONG, SILENT)


@dataclass(frozen=True)
class Verdict:
    """A kind of :data:`KINDS`, and what happened if it is not exact."""

    kind: str
    text: str = ""

    @classmethod
    def of_error(cls, kind: str, error: BaseException) -> Verdict:
        """Return a verdict with the first lines of an error."""
        lines = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        return cls(kind, f"{type(error).__name__}: {lines}"[:240])

    def at(self, place: str) -> Verdict:
        """Return it with the place in its text."""
        return Verdict(self.kind, f"{place}: {self.text}" if self.text else "")


def find_worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict, the first of these."""
    return max(verdicts, key=lambda verdict: KINDS.index(verdict.kind))
