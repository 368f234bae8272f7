"""Uncommitted blocks as uploads: names of blocks, and lists of them.

Azure has no uploads with an id: blocks belong to the name of a blob until a list of blocks makes the blob of them. So
the id of an upload is part of the name of each block. Block 0 marks an upload: it has one byte, and is in no blob.
If it is missing at the end, the upload was aborted.

:mod:`rankless.storage.azure.azure_store` uses it in uploads and clean-ups. The names of blocks are in the store, and
another process, also of another version, must be able to recognize and abort them.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import parse_qsl, urlencode
from xml.sax.saxutils import escape

from rankless.storage.http.xml import find_text, local_name, parse_xml

#: The number and the content of the block that marks an upload.
MARK, MARK_DATA = 0, b"-"

#: The header of the notes that are stored with a blob.
NOTE = "x-ms-meta-"

_BLOCK = re.compile("(?P<id>upload=[0-9a-f]{8}(&.*)?) [0-9]{5}")


def make_upload_id(notes: Mapping[str, str]) -> str:
    """Return the id of a new upload. It contains the notes; a block's name may have 64 bytes.

    For example, ``upload=0123abcd`` without notes.
    """
    return urlencode({"upload": secrets.token_hex(4), **notes})


def note_headers(upload_id: str) -> tuple[tuple[str, str], ...]:
    """Return the headers that store the id, and so the notes, with the blob of an upload.

    For example, ``x-ms-meta-upload: 0123abcd``.
    """
    return tuple((f"{NOTE}{name}", value) for name, value in parse_qsl(upload_id))


def block_name(upload_id: str, number: int) -> str:
    """Return the name of a block. All blocks of a blob must have names of the same length."""
    return base64.b64encode(f"{upload_id} {number:05}".encode()).decode()


def find_uploads(names: Iterable[str]) -> set[str]:
    """Return the ids of the uploads that blocks belong to. Blocks of other programs belong to none."""
    found = (_BLOCK.fullmatch(_decode_name(name)) for name in names)
    return {match["id"] for match in found if match}


def _decode_name(name: str) -> str:
    try:
        return base64.b64decode(name).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def build_block_list(names: Sequence[str]) -> bytes:
    """Return the list that makes a blob of uncommitted blocks."""
    blocks = "".join(f"<Uncommitted>{escape(name)}</Uncommitted>" for name in names)
    return f'<?xml version="1.0" encoding="utf-8"?><BlockList>{blocks}</BlockList>'.encode()


def parse_block_list(body: bytes) -> dict[str, int]:
    """Return the sizes in bytes of the blocks in a list, by their names."""
    blocks = (element for element in parse_xml(body) if local_name(element) == "Block")
    return {find_text(block, "Name"): int(find_text(block, "Size")) for block in blocks}
