"""Checksums of parts, and of the object that they become. Google Cloud Storage knows CRC-32C, and not CRC-64/NVME.

:mod:`rankless.storage.gcs.gcs_store` makes a record of each part on the rank that sends it; the record is in the
receipt, and rank 0 combines all of them when it completes the upload.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from awscrt.checksums import combine_crc32c, combine_crc64nvme

from rankless.storage.body import Body


class PartChecksums(NamedTuple):
    """The size and the checksums of consecutive bytes."""

    size: int
    crc32c: int
    crc64nvme: int

    @classmethod
    def of(cls, body: Body) -> PartChecksums:
        """Return the checksums of a part."""
        return cls(body.nbytes, body.compute_crc32c(), body.crc64nvme)

    @property
    def record(self) -> Sequence[str]:
        """The checksums as texts."""
        return tuple(map(str, self))

    @classmethod
    def combine(cls, records: Iterable[Sequence[str]]) -> PartChecksums:
        """Return the checksums of consecutive parts. An object has one at least."""
        first, *others = (cls(*map(int, record)) for record in records)
        for part in others:
            first = cls(
                first.size + part.size,
                combine_crc32c(first.crc32c, part.crc32c, part.size),
                combine_crc64nvme(first.crc64nvme, part.crc64nvme, part.size),
            )
        return first


def encode_crc32c(crc: int) -> str:
    """Return a CRC-32C as the header ``x-goog-hash`` has it. For example, ``crc32c=AAAAAA==`` for 0."""
    return f"crc32c={base64.b64encode(crc.to_bytes(4, 'big')).decode()}"


def find_crc32c(header: str) -> str:
    """Return the CRC-32C in a header ``x-goog-hash``, which may have other checksums too; an empty text without one.

    For example, ``crc32c=AAAAAA==`` in ``crc32c=AAAAAA==,md5=…``.
    """
    return next((item.strip() for item in header.split(",") if item.strip().startswith("crc32c=")), "")
