"""How parameters are divided among tensor-parallel ranks, which NxD's files do not say: a description of it.

A layout is a row of rules; the first whose pattern fits a parameter's name is its rule. ``*`` in a pattern stands for
any text. ``docs/migrating-from-nxd.md`` says what a spec file looks like.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from holdfast.errors import InvalidArgumentError

#: Stands for the number of an expert in a name.
EXPERT = "{}"

#: The most pieces of a parameter.
_PIECES = 2**16


class ShardingRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one kind of parameter is divided.

    ``dim`` is what ranks divide among them; without it each has all. What a rank has is one or several pieces beside
    each other: of the parameters ``into``, else ``stride`` pieces of the parameter itself. ``shares`` are the pieces'
    relative sizes, equal where left out. ``copies`` is how often each piece is repeated over the ranks (keys and values
    of grouped-query attention); with ``ordered_for`` the heads are in the order that goes with that number of copies of
    ``kv_heads`` heads.
    ``experts``: the first dimension counts experts, whose parameters the ranks for experts divide; names in ``into``
    with ``{}`` in them are of one expert each, and ``transposed`` ones have rows for columns.
    """

    match: str
    dim: int | None = None
    into: tuple[str, ...] = ()
    stride: int = 1
    shares: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    ordered_for: tuple[int, ...] = ()
    kv_heads: int = 0
    experts: bool = False
    transposed: bool = False
    asks: str = ""

    def __post_init__(self) -> None:
        number = len(self.into) or self.stride
        for row in (self.shares, self.copies, self.ordered_for):
            if row and (len(row) != number or min(row) < 1):
                raise ValueError(
                    f"rule {self.match!r}: shares, copies and ordered_for have a number >= 1 for each piece"
                )
        if number > _PIECES:
            raise ValueError(f"rule {self.match!r}: a parameter has at most {_PIECES} pieces, not {number}")
        if self.stride < 1 or (self.dim is not None and self.dim < 0) or (self.into and self.stride != 1):
            raise ValueError(
                f"rule {self.match!r}: dim and stride are counts, and stride is for parameters as they are"
            )
        if max(self.ordered_for, default=1) > 1 and self.kv_heads < 1 and not self.asks:
            raise ValueError(f"rule {self.match!r}: ordered_for needs kv_heads, how many heads have copies")
        if any(name.count("*") != self.match.count("*") for name in self.into):
            raise ValueError(f"rule {self.match!r}: names it is made into have as many * as it has")


class ShardingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout. ``not_trained``: patterns of what the optimizer does not have; ``groups``: what is in which group.

    In a group it is in the order of the model; where ``groups`` list whole names, in theirs.
    ``layer`` is a pattern of the parameters in numbered layers, with ``{}`` for the number, and ``first`` are patterns
    of those before them: what the stages of a pipeline are made of.
    """

    rules: tuple[ShardingRule, ...]
    not_trained: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    layer: str = ""
    first: tuple[str, ...] = ()

    def rule(self, name: str) -> ShardingRule:
        """The rule of a parameter, by its name in NxD. Raises ``InvalidArgumentError`` where there is none."""
        found = next((rule for rule in self.rules if match_stars(rule.match, name) is not None), None)
        if found is None:
            raise InvalidArgumentError(
                f"the layout says nothing of {name!r}: add a rule to it, such as "
                f'{{"match": "{name}", "dim": 0}}, or without dim where every tensor-parallel rank has all of it'
            )
        if found.asks:
            raise InvalidArgumentError(f"{name!r}: {found.asks}")
        return found

    def stored(self, name: str) -> str:
        """The name in NxD of what a whole parameter goes into. Raises ``InvalidArgumentError`` where none is said."""
        for rule in self.rules:
            for pattern in () if rule.asks else rule.into or (rule.match,):
                found = match_stars(pattern, name)
                if found is not None:
                    return fill_template(rule.match, found)
        raise InvalidArgumentError(f"the layout does not say what {name!r} is in NxD: add a rule for it")

    def stage(self, name: str, layers: int, stages: int) -> int:
        """The stage of a pipeline that a parameter is in, by its name in NxD, of so many layers and stages."""
        layer = number_of(self.layer, name) if self.layer else None
        if layer is not None:
            return layer * stages // layers
        return 0 if any(match_stars(pattern, name) is not None for pattern in self.first) else stages - 1

    def is_trained(self, name: str) -> bool:
        """Whether the optimizer has a parameter."""
        return not any(match_stars(pattern, name) is not None for pattern in self.not_trained)

    def group(self, name: str) -> int:
        """The group of the optimizer that a parameter is in. Raises ``InvalidArgumentError``."""
        for number, patterns in enumerate(self.groups or (("*",),)):
            if any(match_stars(pattern, name) is not None for pattern in patterns):
                return number
        raise InvalidArgumentError(f"the layout's groups say nothing of {name!r}")


class ShardPiece(NamedTuple):
    """A piece of what a rank has: of which parameter, its share, and how its blocks are spread over the ranks."""

    name: str
    share: int
    copies: int
    ordered_for: int
    kv_heads: int


def shard_pieces(rule: ShardingRule, name: str) -> list[ShardPiece]:
    """The pieces that a parameter is made of, by its name in NxD."""
    found = match_stars(rule.match, name) or ()
    names = [fill_template(pattern, found) for pattern in rule.into] or [name] * rule.stride
    ones = (1,) * len(names)
    rows = zip(names, rule.shares or ones, rule.copies or ones, rule.ordered_for or ones, strict=True)
    return [ShardPiece(*row, rule.kv_heads) for row in rows]


def held_range(piece: ShardPiece, tp: int, rank: int) -> tuple[int, int]:
    """Into how many equal blocks a piece is divided in all, and which of them a rank has.

    Raises ``InvalidArgumentError`` where it cannot be divided so.
    """
    if tp % piece.copies:
        raise InvalidArgumentError(f"{piece.name!r}: {tp} tensor-parallel ranks cannot have {piece.copies} copies")
    if piece.ordered_for > 1:
        if tp != piece.kv_heads * piece.ordered_for:
            raise InvalidArgumentError(
                f"{piece.name!r}: {piece.ordered_for} copies of {piece.kv_heads} heads are for as many tensor-parallel "
                f"ranks, and there are {tp}: in which order NxD has the other heads then, is not known here"
            )
        return tp, rank % piece.kv_heads * piece.ordered_for + rank // piece.kv_heads
    return tp // piece.copies, rank % (tp // piece.copies)


@lru_cache(4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*|\{\})", pattern)
    special = {"*": "(.*?)", "{}": r"(?P<number>\d{1,6})"}
    return re.compile("".join(special.get(part, re.escape(part)) for part in parts), re.DOTALL)


def match_stars(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the ``*`` of a pattern stand for in a name; ``None`` where it does not fit."""
    match = _compiled(pattern).fullmatch(name)
    if match is None:
        return None
    number = match.re.groupindex.get("number")
    return tuple(text for index, text in enumerate(match.groups(), 1) if index != number)


def number_of(pattern: str, name: str) -> int | None:
    """The number that ``{}`` of a pattern stands for in a name; ``None`` where it does not fit."""
    match = _compiled(pattern).fullmatch(name)
    return int(match["number"]) if match and "number" in match.re.groupindex else None


def fill_template(pattern: str, texts: Sequence[str]) -> str:
    """A pattern with texts for its ``*``."""
    row = iter(texts)
    return "".join(next(row) if part == "*" else part for part in re.split(r"(\*)", pattern))


def parse_spec(text: str, source: str) -> ShardingSpec:
    """A layout from JSON. Raises ``InvalidArgumentError`` naming its source and what is wrong."""
    try:
        return msgspec.json.decode(text, type=ShardingSpec)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{source} is no layout: {error}") from error
