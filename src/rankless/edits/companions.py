"""The small files next to a model that an edit must fit: its configuration and its tokenizer."""

from __future__ import annotations

import json

from rankless.errors import InvalidArgumentError
from rankless.formats.contained_paths import check_contained
from rankless.formats.native import NativeReader
from rankless.formats.reader import Reader
from rankless.ondisk.data_files import CONFIG
from rankless.storage.store import store_of

_TOKENIZER = "tokenizer.json"

#: The largest such file that is read.
_LARGEST = 256 * 2**20


def read_config(reader: Reader) -> bytes | None:
    """Return the bytes of ``config.json`` of a checkpoint, or ``None`` if it has none."""
    return _read_companion(reader, CONFIG)


def check_tokenizer(reader: Reader, rows: int) -> None:
    """Raise ``InvalidArgumentError`` if the tokenizer next to a model has tokens without a row."""
    raw = _read_companion(reader, _TOKENIZER)
    largest = _largest_token(raw) if raw is not None else None
    if largest is not None and largest >= rows:
        raise InvalidArgumentError(
            f"the tokenizer in {reader.path} has the token {largest}, and the edited model has {rows} rows: remove "
            "tokens from the tokenizer first, or keep more rows"
        )


def _read_companion(reader: Reader, name: str) -> bytes | None:
    if isinstance(reader, NativeReader):
        found = [path for path in (name, f"model/{name}") if path in reader.manifest.files]
        return reader.read_small_file(found[0]) if found else None
    for folder in (reader.path, reader.path / "model"):
        store = store_of(folder)
        if store.is_file(folder / name):
            check_contained(folder / name, reader.path)
            return store.read_small(folder / name, _LARGEST)
    return None


def _largest_token(raw: bytes) -> int | None:
    """Return the largest number of a token in a ``tokenizer.json``; ``None`` if it has another form."""
    try:
        table = json.loads(raw)
        vocab = table["model"]["vocab"]
        numbers = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        numbers += [token["id"] for token in table.get("added_tokens") or ()]
        return max((number for number in numbers if isinstance(number, int)), default=None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
