"""The checksums that the Hugging Face Hub has of its files, as its library keeps them next to a download.

:class:`~rankless.inference.open_weights.ModelWeights` calls it on each rank for a share of the files, in the vote
"reading the headers".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rankless.engine.plan.file_ranges import CHUNK
from rankless.errors import CorruptCheckpointError, InvalidArgumentError, StorageError
from rankless.storage.store import store_of

_SHA256 = re.compile(r"[0-9a-f]{64}")

#: Where the library keeps the metadata of a file that was downloaded into a folder of its own: the second line of the
#: file is the ETag, which is the SHA-256 of a large file.
_METADATA = ".cache/huggingface/download"


def check_hub_files(files: Iterable[Path]) -> None:
    """Read files whole, and compare them with the SHA-256 that the Hub has of each.

    Raises ``CorruptCheckpointError`` naming a file that differs, ``InvalidArgumentError`` if a file has no checksum.
    """
    for file in files:
        expected = _find_sha256(file)
        if expected is None:
            raise InvalidArgumentError(
                f"{file} has no SHA-256 of the Hub: it is neither in the cache of its library nor in a folder that "
                '"hf download --local-dir" has filled; pass verify=True, and convert the model to give it checksums'
            )
        actual = _compute_sha256(file)
        if actual != expected:
            raise CorruptCheckpointError(
                f"{file} is corrupt: its SHA-256 is {actual}, and the Hub has {expected}; download it again"
            )


def _compute_sha256(file: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
    with store_of(file).open_reader(file) as reader:
        for start in range(0, reader.size, CHUNK):
            chunk = buffer[: min(CHUNK, reader.size - start)]
            reader.read(start, chunk)
            digest.update(chunk)
    return digest.hexdigest()


def _find_sha256(file: Path) -> str | None:
    if store_of(file).is_remote:
        return None
    blob = file.resolve().name  # in the cache, a snapshot has links to files that are named by their ETag
    if _SHA256.fullmatch(blob):
        return blob
    metadata = file.parent / _METADATA / f"{file.name}.metadata"
    with suppress(StorageError, UnicodeDecodeError):
        lines = store_of(metadata).read_small(metadata).decode().splitlines()
        if len(lines) > 1 and _SHA256.fullmatch(lines[1]):
            return lines[1]
    return None
