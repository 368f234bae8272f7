"""Checks of the settings of stores, and calls of those that are functions. No message contains a secret.

The stores check their arguments with it when they are made, on each rank.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rankless.errors import InvalidArgumentError, StorageError

T = TypeVar("T")

#: Headers of requests as stores keep them: sorted pairs of names and values.
Headers = tuple[tuple[str, str], ...]


def check_headers(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> Headers:
    """Return headers as sorted pairs, names in lower case. Raises ``InvalidArgumentError``, without any value.

    For example, ``{"X-A": "1"}`` becomes ``(("x-a", "1"),)``.
    """
    try:
        pairs = sorted(dict(headers).items())
    except (TypeError, ValueError):
        raise InvalidArgumentError("headers must be a mapping from names to values, both texts") from None
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, str) or not name:
            raise InvalidArgumentError("headers must be a mapping from names to values, both texts")
        if not is_header_text(name) or not is_header_text(value) or value != value.strip():
            raise InvalidArgumentError(
                f"the header {name!r} has a character that HTTP does not allow, or a space at an end: remove it"
            )
    return tuple((name.lower(), value) for name, value in pairs)


def is_header_text(text: str) -> bool:
    """Return whether a text can be sent in a header."""
    return text.isascii() and not any(ord(char) < ord(" ") or char == "\x7f" for char in text)


def call_credentials(function: Callable[[], T]) -> T:
    """Call a function that was passed as credentials, and return its result. Raises ``StorageError`` if it fails.

    The text of its error may contain a secret, so it is not repeated, and it is not the cause of the new one.
    """
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - whatever the caller's function raises
        name = type(error).__name__
    raise StorageError(
        errno.EACCES,
        f"the function that was passed as credentials has raised a {name}. Its message is not repeated, because it may "
        "contain a secret: call the function by itself to see it",
    )


def check_seconds(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """Raise ``InvalidArgumentError`` unless an argument is a number of seconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not may_be_zero):  # type: ignore[operator]
        raise InvalidArgumentError(f"{name} must be a number of seconds, above 0; got {value!r}")


def check_ca_file(ca_file: str | None) -> None:
    """Raise ``InvalidArgumentError`` unless an argument is the path of a file with certificates, or ``None``."""
    if ca_file is not None and not os.path.isfile(ca_file):  # noqa: PTH113 - it may be bytes, or any object
        raise InvalidArgumentError(f"ca_file must be the path of a file with certificates; got {ca_file!r}")


def check_connection_settings(store: Any) -> None:
    """Check the settings that all stores have, and normalize the headers of a frozen dataclass."""
    object.__setattr__(store, "headers", check_headers(store.headers))
    check_seconds("timeout", store.timeout)
    check_seconds("retry_seconds", store.retry_seconds, may_be_zero=True)
    check_ca_file(store.ca_file)
