"""Recipes: the verbs of an edit, in order, as texts of the command line, as a TOML file, or as its tables.

:func:`parse_recipe` checks everything that can be checked without the checkpoint, on each rank, before anything is
opened. :func:`encode_recipe` returns the text that manifests record. Ranks compare their arguments by it.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Union, get_args

import msgspec

from rankless.edits.average import Average
from rankless.edits.cast import Cast
from rankless.edits.dequantise import Dequantise
from rankless.edits.freeze import Freeze, Unfreeze
from rankless.edits.layers import Layers
from rankless.edits.rename import Rename
from rankless.edits.resize_vocab import ResizeVocab
from rankless.edits.upcycle import Upcycle
from rankless.errors import InvalidArgumentError
from rankless.storage.posix import read_small

#: A step of an edit.
Verb = Union[Average, Cast, Dequantise, Freeze, Layers, Rename, ResizeVocab, Unfreeze, Upcycle]  # noqa: UP007 - of msgspec

#: The argument that users pass as an edit: the path of a recipe, or verbs as texts, or as tables of a recipe.
Edit = str | PathLike[str] | Sequence[str | Mapping[str, Any]]

#: The most verbs of a recipe, and the largest file.
_MOST_VERBS, _LARGEST = 100, 2**20

#: The most digits of the numbers of a range.
_DIGITS = 5

#: The classes by the name of the verb.
VERBS: dict[str, type[Any]] = {verb.__struct_config__.tag: verb for verb in get_args(Verb)}

#: The argument that may be given without its name, as the first word after the verb.
_FIRST = {
    "resize-vocab": "size",
    "freeze": "include",
    "unfreeze": "include",
    "cast": "dtype",
    "upcycle": "experts",
    "average": "last",
}


def parse_recipe(edit: Edit) -> tuple[Verb, ...]:
    """Return the verbs of an edit. Raises ``InvalidArgumentError``, which names the verb and the argument."""
    if isinstance(edit, str) and " " in edit and edit.partition(" ")[0] in VERBS:
        raise InvalidArgumentError(f"a text is the path of a recipe: pass verbs as a list, [{edit!r}]")
    if isinstance(edit, str | PathLike):
        verbs = _parse_file(Path(fspath(edit)))
    elif isinstance(edit, Sequence):
        verbs = [_parse_text(verb) if isinstance(verb, str) else _convert(verb) for verb in edit]
    else:
        raise InvalidArgumentError(f"an edit is the path of a recipe, or a list of verbs; got {edit!r}")
    if not 0 < len(verbs) <= _MOST_VERBS:
        raise InvalidArgumentError(f"an edit has 1 to {_MOST_VERBS} verbs; this one has {len(verbs)}")
    for number, verb in enumerate(verbs):
        if isinstance(verb, Average):
            verb.check()
            if number:
                raise InvalidArgumentError(
                    "average: it must be the first verb: other checkpoints are as they were saved"
                )
    return tuple(verbs)


def encode_recipe(verbs: Sequence[Verb]) -> str:
    """Return a recipe as JSON, with all arguments, also those that were not given."""
    return msgspec.json.encode([*verbs]).decode()


def describe_recipe(recipe: str) -> str:
    """Return a recipe of a manifest as the command line has it, without arguments that have their defaults.

    For example, ``layers drop=4,5``. One of a newer version, with verbs that are not known, is returned as it is.
    """
    try:
        verbs = [_convert(table) for table in msgspec.json.decode(recipe, type=list[dict[str, Any]])]
    except (msgspec.DecodeError, InvalidArgumentError):
        return recipe
    return ", ".join(" ".join([_name_of(verb), *_describe_arguments(verb)]) for verb in verbs)


def _name_of(verb: Verb) -> str:
    return str(verb.__struct_config__.tag)


def _describe_arguments(verb: Verb) -> Iterator[str]:
    for field in msgspec.structs.fields(verb):
        value = getattr(verb, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            yield text if _FIRST.get(_name_of(verb)) == field.name else f"{field.name}={text}"


def _parse_file(path: Path) -> list[Verb]:
    try:
        table = tomllib.loads(read_small(path, _LARGEST).decode())
    except (ValueError, RecursionError) as error:  # of Unicode, of TOML, of integers with too many digits
        raise InvalidArgumentError(f"{path} is no recipe: {error}") from error
    entries = table.get("edit")
    if not isinstance(entries, list) or table.keys() - {"edit"}:
        raise InvalidArgumentError(f"{path} is no recipe: it must consist of tables [[edit]], each with a verb")
    return [_convert(entry, f"{path}: ") for entry in entries]


def _parse_text(text: str) -> Verb:
    """Return a verb of the command line: ``resize-vocab 50304 rows=mean``."""
    try:
        name, *words = shlex.split(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{text!r} is no verb of an edit such as 'resize-vocab 50304'") from error
    arguments: dict[str, Any] = {"verb": name}
    if name not in VERBS:
        return _convert(arguments)  # raises the error
    for number, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals and number == 0 and name in _FIRST:
            key, value = _FIRST[name], word
        elif not equals:
            raise InvalidArgumentError(f"{text!r}: {word!r} is no argument: pass NAME=VALUE")
        elif name == "rename":
            arguments.setdefault("names", {})[key] = value
            continue
        if key in arguments:
            raise InvalidArgumentError(f"{text!r}: {key} is given twice: put commas between several values")
        arguments[key] = _parse_value(VERBS[name], key, value)
    return _convert(arguments)


def _parse_value(verb: type[Any], key: str, value: str) -> Any:
    """Return an argument by its type: a number, a text, or a list with commas, such as ``[0, 4, 5]`` for ``0,4-5``."""
    types = {field.name: str(field.type) for field in msgspec.structs.fields(verb)}
    kind = types.get(key, "str")
    if "list[int]" in kind:
        return [number for part in value.split(",") for number in _parse_numbers(part)]
    if "list" in kind:
        return value.split(",")
    return _parse_integer(value) if "int" in kind else value


def _parse_numbers(text: str) -> Sequence[Any]:
    """Return a number, or a range such as ``4-7``."""
    first, dash, last = text.partition("-")
    if dash and first.isdecimal() and last.isdecimal() and max(len(first), len(last)) <= _DIGITS:
        return range(int(first), int(last) + 1)
    return [_parse_integer(text)]


def _parse_integer(text: str) -> Any:
    """Return an integer; text that is none stays, and is refused by its type."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else text  # noqa: PLR2004 - digits


#: How msgspec says that an argument is missing.
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def _convert(arguments: Any, where: str = "") -> Verb:
    name = arguments.get("verb") if isinstance(arguments, Mapping) else None
    verb = VERBS.get(name) if isinstance(name, str) else None
    if verb is None:
        from difflib import get_close_matches  # noqa: PLC0415 - only a mistake needs it

        nearest = get_close_matches(str(name), sorted(VERBS), n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(sorted(VERBS))}"
        raise InvalidArgumentError(f"{where}no edit has the verb {name!r}: {hint}")
    try:
        converted: Verb = msgspec.convert(dict(arguments), verb)
        msgspec.json.encode(converted)  # text that is no Unicode
    except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as error:
        text = _MISSING.sub(r"pass \1=", str(error))
        raise InvalidArgumentError(f"{where}{name}: {text}") from error
    return converted
