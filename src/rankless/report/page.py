"""The page: a template, a style, scripts and data in one file, which loads nothing and runs nothing else.

All that comes from checkpoints is JSON in an element of its own, and reaches the page as text. A content security
policy names the hashes of the script and the style, so nothing else would run even if it got into the page.

``rankless report`` calls it last. Nothing of a checkpoint may get into the page other than as data.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import pkgutil
from collections.abc import Mapping
from typing import Any

from rankless.errors import StorageError
from rankless.observe.terminal import escape_control_characters

#: The scripts, in their order. Together they are one function.
_SCRIPTS = ("format.js", "data.js", "summary.js", "timeline.js", "treemap.js", "charts.js", "table.js", "main.js")

#: The files of others by their names, in their order. Their licences ask to be in each copy.
_VENDORED = {"uPlot": "uPlot.iife.min.js", "d3-hierarchy": "d3-hierarchy.min.js"}

#: Characters that JSON may contain but an element with a script must not.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def render_page(title: str, data: Mapping[str, Any]) -> bytes:
    """Return the page. Control characters of all texts are escaped."""
    style = _read_asset("vendor/uPlot.min.css") + _read_asset("style.css")
    script = "".join(
        f"/*\n{_read_asset(f'vendor/{name}.LICENSE.txt')}\n*/\n{_read_asset(f'vendor/{file}')}"
        for name, file in _VENDORED.items()
    )
    script += f"(() => {{\n'use strict';\n{''.join(map(_read_asset, _SCRIPTS))}}})();\n"
    policy = (
        f"default-src 'none'; script-src {_hash_source(script)}; style-src {_hash_source(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "TITLE": html.escape(escape_control_characters(title)),
        "POLICY": policy,
        "STYLE": style,
        "DATA": encode_data(data),
        "SCRIPT": script,
    }
    # Split, not replaced: data may contain text that looks like a mark.
    pieces = _read_asset("page.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces)).encode()


def encode_data(data: Mapping[str, Any]) -> str:
    """Return data as JSON in ASCII that no parser of HTML mistakes for a tag."""
    return json.dumps(_escape_texts(data), separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _escape_texts(value: Any) -> Any:
    if isinstance(value, str):
        return escape_control_characters(value)
    if isinstance(value, Mapping):
        return {escape_control_characters(name): _escape_texts(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_texts(item) for item in value]
    return value


def _hash_source(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _read_asset(name: str) -> str:
    data = pkgutil.get_data(__package__, f"assets/{name}")
    if data is None:
        raise StorageError(None, f"the package has no file {name}: install it again")
    return data.decode()
