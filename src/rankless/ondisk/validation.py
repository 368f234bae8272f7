"""Validation of tags, file names, tensor names, manifest numbers and arguments.

Public functions check their arguments with it on each rank, inside :mod:`rankless.engine.comm.collective_call` or the
first vote, which make errors common. :func:`state_key` makes names of tensors that are in files.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from rankless.errors import InvalidArgumentError, UnsafeNameError

#: Integers of the manifest are below this in magnitude.
_INT_LIMIT = 2**63

#: NumPy's type of ``True`` and ``False``, in versions 2 and 1: what its comparisons return.
_NUMPY_FLAGS = {("numpy", "bool"), ("numpy", "bool_")}

#: The most bytes of a tag.
_TAG_BYTES = 200

#: The most bytes of a path component on common file systems, and of the path of a checkpoint's file.
_COMPONENT_BYTES, _PATH_BYTES = 255, 1000


def state_key(fqn: str, state: str) -> str:
    """Return a tensor's name in ``optimizer/``: the FQN, a slash, the state's name with ``%`` and ``/`` escaped.

    For example, ``state_key("fc.weight", "exp_avg")`` is ``fc.weight/exp_avg``.
    """
    return f"{fqn}/{state.replace('%', '%25').replace('/', '%2F')}"


def split_state_key(name: str) -> tuple[str, str]:
    """Split a :func:`state_key` into the FQN and the state's name."""
    fqn, _, state = name.rpartition("/")
    return fqn, unquote(state)


def check_tag(tag: object) -> str:
    """Return a tag that can be a directory's name: one path component, not hidden, of at most 200 bytes.

    Raises ``InvalidArgumentError`` for any other value.
    """
    if not isinstance(tag, str) or not tag:
        raise InvalidArgumentError(f"a tag must be a text such as 'step_1000'; got {tag!r}")
    if "/" in tag or "\\" in tag or not tag.isprintable() or tag.startswith("."):
        raise InvalidArgumentError(
            f"tag {tag!r} cannot be a directory's name: remove slashes, a leading dot and control characters"
        )
    if len(tag.encode()) > _TAG_BYTES:
        raise InvalidArgumentError(f"tag {tag[:40]!r}… has more than {_TAG_BYTES} bytes; shorten it")
    return tag


#: No file of a checkpoint has a larger one.
_LARGEST_INTEGER = 2**63 - 1


def check_integer(argument: str, value: Any, *, smallest: int) -> int:
    """Return an integer of any type, which files of JSON can have. Raises ``InvalidArgumentError``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = smallest - 1
    if isinstance(value, bool) or number < smallest:
        raise InvalidArgumentError(f"{argument} must be an integer of at least {smallest}; got {value!r}")
    if number > _LARGEST_INTEGER:
        raise InvalidArgumentError(f"{argument} must be at most {_LARGEST_INTEGER}; got {value!r}")
    return number


def is_tag(name: str) -> bool:
    """Return whether a name can be a tag."""
    try:
        return bool(check_tag(name))
    except InvalidArgumentError:
        return False


def check_keys(keys: object) -> None:
    """Check the argument ``keys``, which maps components to their paths in another system's checkpoint.

    Raises ``InvalidArgumentError`` if it is neither a mapping of text to text nor ``None``.
    """
    is_text_mapping = isinstance(keys, Mapping) and all(isinstance(text, str) for pair in keys.items() for text in pair)
    if keys is not None and not is_text_mapping:
        raise InvalidArgumentError(
            f"keys must map components to their paths, such as {{'model': 'app.net'}}; got {keys!r:.80}"
        )


def check_relative_path(name: str, source: str) -> str:
    """Return a relative file name that stays inside its directory. Raises ``UnsafeNameError`` naming ``source``."""
    path = PurePosixPath(name)
    unsafe = (
        not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or str(path) != name
    )
    too_long = len(name.encode()) > _PATH_BYTES or any(len(part.encode()) > _COMPONENT_BYTES for part in path.parts)
    if unsafe or too_long:
        shown = repr(name[:_TAG_BYTES]) + ("…" if len(name) > _TAG_BYTES else "")
        raise UnsafeNameError(f"{source} names the file {shown}, which is not a plain path inside its directory")
    return name


def check_utf8(text: object, subject: str) -> str:
    """Return a text that can be encoded as UTF-8. Raises ``InvalidArgumentError`` naming ``subject``."""
    try:
        if isinstance(text, str):
            text.encode()
            return text
    except UnicodeEncodeError:
        pass
    raise InvalidArgumentError(f"{subject} must be text without lone surrogates; got {text!r}")


def check_number(name: str, value: object) -> int | float:
    """Return a number of at most 64 bits, NumPy's too, as a plain one. Raises ``InvalidArgumentError`` naming it."""
    if isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < _INT_LIMIT:
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral):
        return float(value)
    raise InvalidArgumentError(f"{name} must be a number of at most 64 bits; got {str(value)[:40]!r}")


def check_timeout(timeout: object) -> float:
    """Return a timeout in seconds. Raises ``InvalidArgumentError`` unless it is a number above 0."""
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise InvalidArgumentError(f"timeout must be a number of seconds above 0; got {timeout!r}")
    return float(timeout)


def check_flag(argument: str, value: object) -> bool:
    """Return a flag, NumPy's too, as a plain one. Raises ``InvalidArgumentError`` naming it for any other value."""
    if isinstance(value, bool) or (type(value).__module__, type(value).__name__) in _NUMPY_FLAGS:
        return bool(value)
    raise InvalidArgumentError(f"{argument} must be True or False; got {value!r:.80}")


def check_choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """Raise ``InvalidArgumentError`` naming the argument if its value is none of the choices."""
    if value not in choices:
        raise InvalidArgumentError(f"{argument} must be one of {', '.join(choices)}; got {value!r}")
