"""The names of experts: in the optimizer they count over one expert-parallel rank, in the model over all."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rankless.errors import FormatError
from rankless.formats.deepspeed.partitions import Shapes

#: The number of an expert in a parameter's name.
_EXPERT = re.compile(r"(?P<prefix>.*deepspeed_experts\.)(?P<number>\d{1,6})(?P<suffix>\..*)", re.ASCII)


def number_experts(shapes: Shapes, expert_rank: int) -> Shapes:
    """Return the shapes of the experts of an expert-parallel rank by their names, which count over all ranks."""
    numbers: dict[str, set[str]] = {}
    for match in map(_EXPERT.fullmatch, shapes):
        if match is not None:
            numbers.setdefault(match["prefix"], set()).add(match["number"])
    return {_rename_expert(name, numbers, expert_rank): shape for name, shape in shapes.items()}


def _rename_expert(name: str, numbers: Mapping[str, set[str]], expert_rank: int) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None:
        raise FormatError(
            f"the parameter {name!r:.100} is divided among ranks as an expert, but its name has no number of an expert"
        )
    number = expert_rank * len(numbers[match["prefix"]]) + int(match["number"])
    return f"{match['prefix']}{number}{match['suffix']}"
