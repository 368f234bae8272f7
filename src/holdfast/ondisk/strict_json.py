"""JSON read strictly: every key once, finite numbers only, text without lone surrogates.

What a lenient parser lets pass means one thing to one reader and another to the next.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from holdfast.errors import CorruptCheckpointError

#: An escape of half a character; two of them may make a whole one.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes, what: str) -> Any:
    """The JSON in ``raw``. Raises ``CorruptCheckpointError`` naming ``what``."""
    try:
        tree = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
        if _HALF.search(raw):
            json.dumps(tree, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is not the JSON that it should be: {error}") from error
    return tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond all numbers that a float can be")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
