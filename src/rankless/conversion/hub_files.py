"""The small files of an exported model: configuration, tokenizer or processor, and a model card.

:mod:`rankless.conversion.hub_export` reads them on each rank, in the vote "preparing the export", which compares their
digests: the bytes must be equal on all ranks. :mod:`rankless.megatron.writer.megatron_source` reads the configuration
of a model with it, on each rank of a conversion to ``megatron``. Only files with the names of tokenizers may be copied
out of a folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

from rankless.errors import InvalidArgumentError
from rankless.ondisk.data_files import CONFIG
from rankless.storage import posix

#: The name of a model card.
CARD = "README.md"

#: The names of the files of tokenizers and processors. Everything else in a folder is left out: it may be a whole
#: model with secrets next to it.
_TOKENIZER_FILES = (
    *("tokenizer*.json", "tokenizer.model*", "*.tiktoken", "spiece.model", "sentencepiece*.model", "*.spm"),
    *("vocab*.json", "vocab*.txt", "merges.txt", "bpe.codes", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template.jin*", "chat_template.json", "additional_chat_templates/*.jinja", "normalizer.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)


def read_tokenizer(tokenizer: Any) -> dict[str, bytes]:
    """Return the files of a tokenizer or processor, by their names: of an object, or of a folder.

    Raises ``InvalidArgumentError`` if there are none.
    """
    if hasattr(tokenizer, "save_pretrained"):
        with tempfile.TemporaryDirectory() as temporary:
            tokenizer.save_pretrained(temporary)
            return dict(_read_folder(Path(temporary), ("*",)))
    folder = _as_path(tokenizer, "tokenizer")
    files = dict(_read_folder(folder, _TOKENIZER_FILES))
    if not files:
        raise InvalidArgumentError(f"tokenizer: there are no files of a tokenizer in {folder}")
    return files


def read_config(config: Any) -> bytes:
    """Return a configuration as JSON: of an object, a file, or a folder with a ``config.json``."""
    if hasattr(config, "to_json_string"):
        text: str = config.to_json_string()
        return text.encode()
    path = _as_path(config, "config")
    return _read_file(path / CONFIG if posix.is_directory(path) else path, "config")


def read_card(card: Any) -> bytes:
    """Return the contents of a file with a model card."""
    return _read_file(_as_path(card, "card"), "card")


def _read_folder(folder: Path, patterns: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for file in sorted(posix.walk_files(folder)):
        name = file.relative_to(folder).as_posix()
        if any(_matches(name, pattern) for pattern in patterns):
            yield name, posix.read_small(file)


def _matches(name: str, pattern: str) -> bool:
    return pattern == "*" or (fnmatchcase(name, pattern) and name.count("/") == pattern.count("/"))


def _read_file(path: Path, argument: str) -> bytes:
    if not posix.is_file(path):  # a FIFO would block
        raise InvalidArgumentError(f"{argument}: {path} is not a file")
    return posix.read_small(path)


def _as_path(given: Any, argument: str) -> Path:
    if not isinstance(given, str | PathLike):
        raise InvalidArgumentError(f"{argument} must be a path or an object of transformers; got {given!r:.80}")
    return posix.local_path(given)
