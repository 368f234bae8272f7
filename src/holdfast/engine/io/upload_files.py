"""Upload of finished local files to an object store, in the parts in which saves upload theirs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from holdfast.engine.io.upload_parts import PART_BYTES, UploadTarget, check_file_size
from holdfast.errors import HoldfastError
from holdfast.ondisk.block_crcs import combine
from holdfast.process.worker_threads import run_in_threads
from holdfast.storage.body import Body
from holdfast.storage.direct_io import BufferedReader
from holdfast.storage.object_path import ObjectPath
from holdfast.storage.posix import file_size

#: The most parts that are sent at a time.
_THREADS = 8


def upload_file(path: ObjectPath, source: Path) -> None:
    """Upload a file; several parts at a time. The object appears when all of it has arrived.

    If the upload fails, its parts are removed.
    """
    size, store = file_size(source), path.store
    check_file_size(str(path), size)
    upload = store.create_upload(path, {}) if size > PART_BYTES else None
    target = UploadTarget(path, size, upload)
    with BufferedReader(source) as reader:

        def send_part(part: int) -> tuple[str, int, int]:
            start = part * PART_BYTES
            data = np.empty(min(PART_BYTES, size - start), np.uint8)
            reader.read(start, data.data)
            body = Body.of(data.data)
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
                with suppress(HoldfastError):  # the first error says why
                    store.abort_upload(upload)
            raise
