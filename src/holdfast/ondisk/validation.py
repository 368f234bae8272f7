"""What may be written down: tags and file names that become paths, names of tensors, numbers of the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import PurePosixPath
from urllib.parse import unquote

from holdfast.errors import InvalidArgumentError, UnsafeNameError

_TOO_LARGE = 2**63

_LONGEST = 200

#: Longest part of a path that file systems take, and longest path of a checkpoint's file, in bytes.
_PART, _PATH = 255, 1000


#: Parts of names that are wrappers' and not the model's own: FSDP1's, activation checkpointing's, torch.compile's.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def strip_wrapper_prefixes(name: str) -> str:
    """A name without wrappers' parts."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def state_key(fqn: str, state: str) -> str:
    """A tensor's name in ``optimizer/``: the FQN, a slash, the state's name with ``%`` and ``/`` escaped."""
    return f"{fqn}/{state.replace('%', '%25').replace('/', '%2F')}"


def split_state_key(name: str) -> tuple[str, str]:
    """The FQN and the state's name of a :func:`state_key`."""
    fqn, _, state = name.rpartition("/")
    return fqn, unquote(state)


def check_tag(tag: object) -> str:
    """A tag that can be a folder's name: one path component, visible, of at most 200 bytes."""
    if not isinstance(tag, str) or not tag:
        raise InvalidArgumentError(f"a tag is a text such as 'step_1000', not {tag!r}")
    if "/" in tag or "\\" in tag or not tag.isprintable() or tag.startswith("."):
        raise InvalidArgumentError(
            f"tag {tag!r} cannot be a folder's name: leave out slashes, a leading dot and control characters"
        )
    if len(tag.encode()) > _LONGEST:
        raise InvalidArgumentError(f"tag {tag[:40]!r}… has more than {_LONGEST} bytes")
    return tag


def check_keys(keys: object) -> None:
    """Check where the user says that parts of another system's checkpoint are: a mapping of text to text, or ``None``.

    Raises ``InvalidArgumentError``.
    """
    is_table = isinstance(keys, Mapping) and all(isinstance(text, str) for pair in keys.items() for text in pair)
    if keys is not None and not is_table:
        raise InvalidArgumentError(
            f"keys names parts and their paths, such as {{'model': 'app.net'}}; not {keys!r:.80}"
        )


def check_relative_path(name: str, source: str) -> str:
    """A relative file name that stays inside its folder. Raises ``UnsafeNameError`` naming ``source``."""
    path = PurePosixPath(name)
    unsafe = (
        not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or str(path) != name
    )
    too_long = len(name.encode()) > _PATH or any(len(part.encode()) > _PART for part in path.parts)
    if unsafe or too_long:
        shown = repr(name[:_LONGEST]) + ("…" if len(name) > _LONGEST else "")
        raise UnsafeNameError(f"{source} names the file {shown}, which is not a plain path inside its folder: refused")
    return name


def check_utf8(name: object, what: str) -> str:
    """A text that files can hold: whole characters. Raises ``InvalidArgumentError`` naming ``what`` it is."""
    try:
        if isinstance(name, str):
            name.encode()
            return name
    except UnicodeEncodeError:
        pass
    raise InvalidArgumentError(f"{what} must be text of whole characters, not {name!r}")


def check_number(name: str, value: object) -> int | float:
    """A plain number of at most 64 bits, NumPy's included. Raises ``InvalidArgumentError`` naming it."""
    if isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < _TOO_LARGE:
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral):
        return float(value)
    raise InvalidArgumentError(f"{name} must be a number of at most 64 bits, not {str(value)[:40]!r}")


def check_choice(what: str, given: object, known: Sequence[str]) -> None:
    """Raise ``InvalidArgumentError`` naming the argument if it is none of those known."""
    if given not in known:
        raise InvalidArgumentError(f"{what} must be one of {', '.join(known)}; got {given!r}")
