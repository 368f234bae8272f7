"""Upload of finished local files and of memory to an object store, in the parts of saves, and the way back.

Drains of parts into a store, outputs of conversions, and saves of DCP call it in one process, without a plan
(:mod:`rankless.run.unpublished_output`, :mod:`rankless.tier.parts_in_store`). The files must not change meanwhile:
parts may be sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from rankless.engine.io.upload_target import PART_BYTES, FileFrame, UploadTarget, check_file_size
from rankless.errors import RanklessError
from rankless.ondisk.block_crcs import combine
from rankless.process.worker_threads import run_in_threads
from rankless.storage.aligned_memory import Bytes
from rankless.storage.body import Body
from rankless.storage.direct_io import BufferedReader
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import file_size

#: The most parts that are sent at a time.
_THREADS = 8


def upload_file(path: ObjectPath, source: Path) -> None:
    """Upload a file; several parts at a time. The object appears when all of it has arrived.

    If the upload fails, its parts are removed.
    """
    size = file_size(source)
    with BufferedReader(source) as reader:

        def read(start: int, stop: int) -> Bytes:
            data = np.empty(stop - start, np.uint8)
            reader.read(start, data.data)
            return data

        _upload(path, size, read)


def upload_memory(path: ObjectPath, memory: Bytes) -> None:
    """Upload bytes as :func:`upload_file` does."""
    _upload(path, len(memory), lambda start, stop: memory[start:stop])


def _upload(path: ObjectPath, size: int, read: Callable[[int, int], Bytes]) -> None:
    check_file_size(str(path), size)
    store = path.store
    upload = store.create_upload(path, {}) if size > PART_BYTES else None
    target = UploadTarget(path, FileFrame(size), upload)

    def send_part(part: int) -> tuple[str, int, int]:
        start = part * PART_BYTES
        body = Body.of(read(start, min(start + PART_BYTES, size)).data)
        return target.send_part(part, body), body.crc64nvme, body.nbytes

    try:
        sent = run_in_threads(send_part, range(max(1, -(-size // PART_BYTES))), _THREADS)
        if upload is not None:
            crc = 0
            for _, crc_of_part, nbytes in sent:
                crc = combine(crc, crc_of_part, nbytes)
            store.complete_upload(upload, [receipt for receipt, _, _ in sent], size, crc)
    except BaseException:
        if upload is not None:
            with suppress(RanklessError):  # the first error says why
                store.abort_upload(upload)
        raise


def download_object(path: ObjectPath, into: Bytes) -> None:
    """Fill memory with the first bytes of an object; several parts at a time."""
    with path.store.open_reader(path) as reader:

        def read_part(start: int) -> None:
            reader.read(start, into[start : start + PART_BYTES].data)

        run_in_threads(read_part, range(0, len(into), PART_BYTES), _THREADS)
