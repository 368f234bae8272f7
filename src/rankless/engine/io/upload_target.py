"""The uploads of files to an object store, and the parts that carry their bytes.

:mod:`rankless.save.shared_upload` has a target for each file, on every rank; rank 0 has begun the uploads. All ranks
and the completion must use parts of :data:`PART_BYTES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rankless.errors import InvalidArgumentError
from rankless.storage.body import Body
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import Upload

#: The size of parts in bytes. It depends on nothing, so that the ETag of an object depends on its bytes only.
PART_BYTES = 16 * 2**20

#: The most parts of an object, in all stores.
_MAX_PARTS = 10_000


class FileFrame(msgspec.Struct, frozen=True, array_like=True):
    """A file without the bytes of its tensors: its size, its header's size, and ``known``: other bytes, by offset.

    The header is known later.
    """

    size: int
    header_bytes: int = 0
    known: Sequence[tuple[int, bytes]] = ()


@dataclass(frozen=True)
class UploadTarget:
    """A file to be uploaded: its path, its frame, and its upload; none if it has one part, and is written at once."""

    path: ObjectPath
    frame: FileFrame
    upload: Upload | None

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self.frame.size

    def is_held(self, start: int) -> bool:
        """Return whether the part at byte ``start`` is kept until the headers are known."""
        return start < self.frame.header_bytes or self.upload is None

    def send_part(self, part: int, body: Body) -> str:
        """Send a part, and return its receipt; for a file of one part, its ETag."""
        if self.upload is not None:
            return self.path.store.put_part(self.upload, part + 1, body)
        return self.path.store.put_object(self.path, body)


def check_file_size(path: str, nbytes: int) -> None:
    """Raise ``InvalidArgumentError`` if a file has more parts than a store accepts, for example a file of 200 GiB."""
    if nbytes > _MAX_PARTS * PART_BYTES:
        raise InvalidArgumentError(
            f"{path} has {nbytes} bytes, and an object store accepts {_MAX_PARTS * PART_BYTES} of one file: "
            "pass a smaller max_shard_size, or split the largest tensor"
        )
