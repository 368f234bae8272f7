r"""Refuse regular expressions that would search a name for ever: ``re`` cannot be interrupted, and holds all threads.

For example, ``^(\w+\.?)+!`` takes twice as long for each further letter of a name. :mod:`rankless.edits.rename` asks
it on each rank, before it renames anything.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rankless.errors import InvalidArgumentError

#: The most seconds that all names of a checkpoint may take.
_SECONDS = 10.0

#: A repeated group, and a repeat. With a few simple repeats a search takes no time worth mentioning.
_REPEATED_GROUP, _REPEAT, _FEW_REPEATS = re.compile(r"\)[*+{]"), re.compile(r"[*+{]|(?<!\()\?"), 2

#: Renames as the verb does, in a process that can be ended.
_CODE = """
import json, re, sys
names, replacements = json.load(sys.stdin)
for name in names:
    for pattern, replacement in replacements.items():
        try:
            name = re.sub(pattern, replacement, name)
        except Exception:
            pass
"""


def check_patterns(replacements: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise ``InvalidArgumentError`` if renaming the names would take too long."""
    suspicious = [pattern for pattern in replacements if _may_be_slow(pattern)]
    if not suspicious or not sys.executable:  # an embedded interpreter has none
        return
    content = json.dumps([list(names), dict(replacements)])
    try:
        command = [sys.executable, "-S", "-c", _CODE]
        subprocess.run(command, input=content, text=True, timeout=_SECONDS, check=False)  # noqa: S603 - our own code
    except subprocess.TimeoutExpired:
        raise InvalidArgumentError(
            f"rename: {suspicious[0]!r} searches names for longer than {_SECONDS:.0f} s: write it without a repeat "
            "inside of a repeat"
        ) from None


def _may_be_slow(pattern: str) -> bool:
    return bool(_REPEATED_GROUP.search(pattern)) or len(_REPEAT.findall(pattern)) > _FEW_REPEATS
