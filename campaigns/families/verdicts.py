"""The verdict on one family: right or wrong, or what transformers itself cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from textwrap import shorten
from typing import Any

from campaigns.families.catalogue import Family
from campaigns.families.reference import Reference
from campaigns.families.round_trips import FSDP2, check_fsdp2, check_plain, make_recipe, make_reference


class Outcome(Enum):
    """What became of a family."""

    RIGHT = "right"
    WRONG = "wrong"
    TRANSFORMERS_FAILS = "transformers' own round trip fails"
    NOT_BUILT = "no tiny model can be built here"


@dataclass(frozen=True)
class Verdict:
    """What became of one family, and why it is not right."""

    family: str
    model_class: str
    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        """Return the verdict as a line."""
        return f"{self.family} ({self.model_class}): {self.outcome.value}{self.reason and f': {self.reason}'}"


def judge(family: Family, layouts: Sequence[str], ranks: Any, folder: Path) -> Verdict:
    """Run the round trips of a family in some layouts, in an empty folder."""
    try:
        recipe = make_recipe(family)
    except Exception as error:  # noqa: BLE001 - settings are not consistent, or a package is missing
        return Verdict(family.name, family.model_class, Outcome.NOT_BUILT, _describe(error))
    try:
        reference = make_reference(recipe, folder / "pretrained")
    except Exception as error:  # noqa: BLE001 - nothing of rankless ran yet
        return Verdict(family.name, family.model_class, Outcome.TRANSFORMERS_FAILS, _describe(error))
    if wrong := " | ".join(_run_layouts(reference, layouts, ranks, folder)):
        return Verdict(family.name, family.model_class, Outcome.WRONG, wrong)
    if reference.fault:
        return Verdict(family.name, family.model_class, Outcome.TRANSFORMERS_FAILS, reference.fault)
    return Verdict(family.name, family.model_class, Outcome.RIGHT)


def _run_layouts(reference: Reference, layouts: Sequence[str], ranks: Any, folder: Path) -> Iterator[str]:
    """Yield what is wrong in each layout."""
    for layout in layouts:
        place = folder / layout
        try:
            texts = check_fsdp2(ranks, 2, reference, place) if layout == FSDP2 else check_plain(reference, place)
        except Exception as error:  # noqa: BLE001 - reported by the campaign
            texts = [_describe(error.__cause__ or error)]
        yield from (f"{layout}: {text}" for text in texts)


def _describe(error: BaseException) -> str:
    """Return an error in one line."""
    return shorten(f"{type(error).__name__}: {error}", 160, placeholder=" …")
