"""The verdict on one family: what is wrong in each layout, or what transformers itself cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.families.catalogue import Family
from campaigns.families.round_trips import FSDP2, check_fsdp2, check_plain, make_recipe, make_reference


@dataclass(frozen=True)
class Verdict:
    """What became of one family: what is wrong by layout, nothing if all is right, or how transformers itself fails."""

    family: str
    model_class: str
    wrong: Mapping[str, list[str]] = field(default_factory=dict)
    fault_of_transformers: str | None = None

    def __str__(self) -> str:
        """Return the verdict as a line."""
        if self.wrong:
            texts = [f"{layout}: {text}" for layout, all_texts in self.wrong.items() for text in all_texts]
            return f"{self.family} ({self.model_class}): WRONG: {' | '.join(texts)}"
        fault = self.fault_of_transformers
        return f"{self.family} ({self.model_class}): {f'transformers fails: {fault}' if fault else 'right'}"


def judge(family: Family, layouts: list[str], ranks: Any, folder: Path) -> Verdict:
    """Run the round trips of a family in some layouts, in an empty folder."""
    try:
        reference = make_reference(make_recipe(family), folder / "pretrained")
    except Exception as error:  # noqa: BLE001 - nothing of rankless ran yet
        return Verdict(family.name, family.model_class, fault_of_transformers=f"{type(error).__name__}: {error}")
    wrong = {}
    for layout in layouts:
        place = folder / layout
        try:
            texts = check_fsdp2(ranks, 2, reference, place) if layout == FSDP2 else check_plain(reference, place)
        except Exception as error:  # noqa: BLE001 - reported by the campaign
            texts = [f"{type(error).__name__}: {error} {error.__cause__!r}"]
        if texts:
            wrong[layout] = texts
    return Verdict(family.name, family.model_class, wrong, reference.fault)
