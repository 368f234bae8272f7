"""Sharding specs: how tensor-parallel ranks divide parameters, which NxD's files do not contain.

A spec (a "layout" for users) is a list of rules; the first rule with a pattern that matches a parameter's name applies.
``*`` in a pattern matches any text: for example, ``*.q_proj.weight`` matches ``layers.0.q_proj.weight``.
``docs/migrating/nxd.md`` describes spec files.

The reader joins by it, and the writer divides by it. Users write such files: the fields must keep their meaning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from rankless.errors import InvalidArgumentError
from rankless.process.prepared_types import prepared

#: The placeholder for the number of an expert in a name.
EXPERT = "{}"

#: The maximum number of pieces of a parameter.
_MAX_PIECES = 2**16


class ShardingRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The division of one kind of parameter.

    ``dim`` is the dimension that ranks divide; without it each rank has the whole parameter. A rank has one or several
    pieces, concatenated along ``dim``: of the parameters ``into``, else ``stride`` pieces of the parameter itself.
    ``shares`` are the relative sizes of the pieces; the default is equal sizes. ``copies`` is how often each piece is
    repeated over the ranks (keys and values of grouped-query attention). With ``ordered_for``, the heads are in the
    order for that number of copies of ``kv_heads`` heads. ``experts``: the first dimension counts experts, and
    expert-parallel ranks divide it. Names in ``into`` that contain ``{}`` are of one expert each; ``transposed`` ones
    have rows and columns swapped. ``asks`` is the error message of a rule that needs more options.
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
                    f"rule {self.match!r}: shares, copies and ordered_for need a number >= 1 for each piece"
                )
        if number > _MAX_PIECES:
            raise ValueError(f"rule {self.match!r}: a parameter must have at most {_MAX_PIECES} pieces; got {number}")
        if self.stride < 1 or (self.dim is not None and self.dim < 0) or (self.into and self.stride != 1):
            raise ValueError(
                f"rule {self.match!r}: dim must be >= 0 and stride >= 1, and stride cannot be combined with into"
            )
        if max(self.ordered_for, default=1) > 1 and self.kv_heads < 1 and not self.asks:
            raise ValueError(f"rule {self.match!r}: ordered_for needs kv_heads, the number of heads that have copies")
        if any(name.count("*") != self.match.count("*") for name in self.into):
            raise ValueError(f"rule {self.match!r}: names in into must have as many * as match")


@prepared
class ShardingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sharding of a model and the param groups of its optimizer.

    ``not_trained`` are patterns of parameters that the optimizer does not have; ``groups`` are the patterns of each
    param group. Parameters in a group are in the order of the model, or in the listed order if ``groups`` lists all
    names. ``layer`` is a pattern of the parameters in numbered layers, with ``{}`` for the number, and ``first`` are
    patterns of the parameters before them; the pipeline stages are made of these.
    """

    rules: tuple[ShardingRule, ...]
    not_trained: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    layer: str = ""
    first: tuple[str, ...] = ()

    def rule_for(self, name: str) -> ShardingRule:
        """Return the rule of a parameter, by its name in NxD. Raises ``InvalidArgumentError`` if there is none."""
        matched = next((rule for rule in self.rules if match_stars(rule.match, name) is not None), None)
        if matched is None:
            raise InvalidArgumentError(
                f"the layout has no rule for {name!r}: add one, such as "
                f'{{"match": "{name}", "dim": 0}}, or without dim if every tensor-parallel rank has all of it'
            )
        if matched.asks:
            raise InvalidArgumentError(f"{name!r}: {matched.asks}")
        return matched

    def stored_name(self, name: str) -> str:
        """Return the name of the NxD parameter that contains a whole parameter.

        Raises ``InvalidArgumentError`` if no rule matches.
        """
        for rule in self.rules:
            for pattern in () if rule.asks else rule.into or (rule.match,):
                texts = match_stars(pattern, name)
                if texts is not None:
                    return fill_template(rule.match, texts)
        raise InvalidArgumentError(f"the layout does not say how NxD stores {name!r}: add a rule for it")

    def stage_of(self, name: str, layers: int, stages: int) -> int:
        """Return the pipeline stage of a parameter by its name in NxD, given the numbers of layers and stages.

        For example, of 8 layers on 2 stages, layers 4 to 7 are on stage 1.
        """
        layer = match_number(self.layer, name) if self.layer else None
        if layer is not None:
            return layer * stages // layers
        return 0 if any(match_stars(pattern, name) is not None for pattern in self.first) else stages - 1

    def is_trained(self, name: str) -> bool:
        """Return whether the optimizer has a parameter."""
        return not any(match_stars(pattern, name) is not None for pattern in self.not_trained)

    def group_of(self, name: str) -> int:
        """Return the number of a parameter's param group. Raises ``InvalidArgumentError`` if no group matches."""
        for number, patterns in enumerate(self.groups or (("*",),)):
            if any(match_stars(pattern, name) is not None for pattern in patterns):
                return number
        raise InvalidArgumentError(f"no group of the layout matches {name!r}: add a pattern for it")


class ShardPiece(NamedTuple):
    """A piece of a rank's shard: its parameter, its share, and how its blocks are spread over the ranks."""

    name: str
    share: int
    copies: int
    ordered_for: int
    kv_heads: int


def shard_pieces(rule: ShardingRule, name: str) -> list[ShardPiece]:
    """Return the pieces that a parameter is made of, by its name in NxD."""
    texts = match_stars(rule.match, name) or ()
    names = [fill_template(pattern, texts) for pattern in rule.into] or [name] * rule.stride
    ones = (1,) * len(names)
    rows = zip(names, rule.shares or ones, rule.copies or ones, rule.ordered_for or ones, strict=True)
    return [ShardPiece(*row, rule.kv_heads) for row in rows]


def rank_block(piece: ShardPiece, tp: int, rank: int) -> tuple[int, int]:
    """Return the number of equal blocks of a piece, and the index of the block that a rank has.

    Raises ``InvalidArgumentError`` if the piece cannot be divided among ``tp`` ranks.
    """
    if tp % piece.copies:
        raise InvalidArgumentError(f"{piece.name!r}: {tp} tensor-parallel ranks cannot have {piece.copies} copies")
    if piece.ordered_for > 1:
        if tp != piece.kv_heads * piece.ordered_for:
            raise InvalidArgumentError(
                f"{piece.name!r}: {piece.ordered_for} copies of {piece.kv_heads} heads need as many tensor-parallel "
                f"ranks, and there are {tp}: rankless does not know the order of heads in NxD for this case"
            )
        return tp, rank % piece.kv_heads * piece.ordered_for + rank // piece.kv_heads
    return tp // piece.copies, rank % (tp // piece.copies)


@lru_cache(4096)
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern with ``*`` and ``{}`` to a regular expression."""
    parts = re.split(r"(\*|\{\})", pattern)
    special = {"*": "(.*?)", "{}": r"(?P<number>\d{1,6})"}
    return re.compile("".join(special.get(part, re.escape(part)) for part in parts), re.DOTALL)


def match_stars(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return the texts that the ``*`` of a pattern match in a name, or ``None`` if it does not match.

    For example, ``*.weight`` matches ``a.b.weight`` with the text ``a.b``.
    """
    match = _compile_pattern(pattern).fullmatch(name)
    if match is None:
        return None
    number = match.re.groupindex.get("number")
    return tuple(text for index, text in enumerate(match.groups(), 1) if index != number)


def match_number(pattern: str, name: str) -> int | None:
    """Return the number that ``{}`` of a pattern matches in a name, or ``None`` if it does not match.

    For example, ``layers.{}.*`` has the number 3 in ``layers.3.weight``.
    """
    match = _compile_pattern(pattern).fullmatch(name)
    return int(match["number"]) if match and "number" in match.re.groupindex else None


def fill_template(pattern: str, texts: Sequence[str]) -> str:
    """Replace each ``*`` of a pattern by a text. For example, ``*.bias`` with the text ``a`` gives ``a.bias``."""
    remaining = iter(texts)
    return "".join(next(remaining) if part == "*" else part for part in re.split(r"(\*)", pattern))


def parse_spec(text: str, origin: str) -> ShardingSpec:
    """Parse a spec from JSON. Raises ``InvalidArgumentError`` naming its origin and the mistake."""
    try:
        return msgspec.json.decode(text, type=ShardingSpec)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{origin} is not a valid layout: {error}") from error
