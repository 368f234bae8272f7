"""A strict JSON parser: unique keys, finite numbers, text without lone surrogates.

Input that only lenient parsers accept can mean different things to different readers.

Headers, manifests and files of values are parsed with it, on each rank that opens a checkpoint. JSON that is refused
here must not be accepted elsewhere: two readers would see other values.
"""

from __future__ import annotations

import json
import math
import re
import sys
from itertools import accumulate
from typing import Any

import msgspec

from rankless.errors import CorruptCheckpointError, MismatchError

#: An escape of a surrogate: half a character. Two of them may form a character.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)

#: By how many levels each bracket leads deeper, and all bytes that are no brackets.
_STEPS = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))
_OTHERS = bytes(set(range(256)) - _STEPS.keys())

#: More levels of brackets than any file of rankless has.
_MAX_LEVELS = 450

#: The most digits of an integer, which is Python's own limit by default, and the digits that no limit forbids.
_MAX_DIGITS, _SAFE_DIGITS = 4300, 640


def parse_json(raw: bytes, subject: str) -> Any:
    """Parse the JSON in ``raw``. Raises ``CorruptCheckpointError`` naming ``subject``.

    Raises ``MismatchError`` if it is not nested deeply, but too deep for this process.
    """
    tree = _parse_canonical(raw)
    if tree is not None:
        return tree
    try:
        tree = json.loads(
            raw.decode(),
            object_pairs_hook=_check_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_parse_finite,
            parse_int=_parse_integer,
        )
        if _SURROGATE.search(raw):
            json.dumps(tree, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError) and _count_levels(raw) <= _MAX_LEVELS:
            raise recursion_error(subject) from error
        raise CorruptCheckpointError(f"{subject} is not valid JSON: {error}") from error
    return tree


def _parse_canonical(raw: bytes) -> Any:
    """Return the value of JSON that is byte for byte what msgspec writes, but for spaces at its end; else ``None``.

    Such JSON is strict, and is parsed in a third of the time: headers of many tensors.
    """
    try:
        tree = msgspec.json.decode(raw)
        return tree if msgspec.json.encode(tree) == raw.rstrip(b" ") else None
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None


def recursion_error(subject: str) -> MismatchError:
    """Return the error of values that this process could read if it were allowed to nest more calls."""
    return MismatchError(
        f"{subject} has values that are nested too deep for this process: call sys.setrecursionlimit() with more than "
        f"{sys.getrecursionlimit()}"
    )


def _count_levels(raw: bytes) -> int:
    """Return how deep brackets are nested outside of texts."""
    brackets = _TEXT.sub(b"", raw).translate(None, _OTHERS)
    return max(accumulate(map(_STEPS.__getitem__, brackets), initial=0))


def _parse_integer(text: str) -> int:
    """Return an integer whatever limit of digits this process has: another one may have saved."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    number = 0
    for start in range(0, len(digits), _SAFE_DIGITS):
        part = digits[start : start + _SAFE_DIGITS]
        number = number * 10 ** len(part) + int(part)
    return sign * number


def _check_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key in an object")
    return result


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of the range of a float")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
