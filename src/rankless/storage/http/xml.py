"""XML in the answers of object stores.

The stores parse lists, results of uploads and errors with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from http import HTTPStatus
from xml.etree import ElementTree as ET


def parse_xml(body: bytes) -> Iterable[ET.Element]:
    """Return all elements of an answer; none if it is no XML."""
    try:
        return list(ET.fromstring(body.strip()).iter())  # noqa: S314 - expat limits the expansion of entities
    except ET.ParseError:
        return []


def local_name(element: ET.Element) -> str:
    """Return the name of an element without its namespace.

    For example, ``Key`` for ``{http://s3.amazonaws.com/doc/2006-03-01/}Key``.
    """
    return element.tag.rpartition("}")[2]


def root_name(body: bytes) -> str:
    """Return the name of the first element of an answer; an empty text if it is no XML."""
    return next((local_name(element) for element in parse_xml(body)), "")


def find_text(elements: Iterable[ET.Element], name: str) -> str:
    """Return the text of the first element of this name, or an empty text."""
    return next((element.text or "" for element in elements if local_name(element) == name), "")


def parse_time(text: str) -> float:
    """Return a time such as ``2026-01-31T12:00:00.000Z`` in seconds since 1970; 0 for an empty text."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def find_error_code(method: str, status: int, body: bytes) -> str:
    """Return the code of an error; also of one in an answer with the status 200, as to the end of an upload."""
    is_error = method == "POST" and root_name(body) == "Error"
    if status >= HTTPStatus.MULTIPLE_CHOICES or is_error:
        return find_text(parse_xml(body), "Code") or ("InternalError" if is_error else "")
    return ""
