"""Readers of buckets that share no code with rankless: they list objects and download them, one request at a time."""

from __future__ import annotations

import hashlib
import hmac
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree as ET

#: The seconds after which a request has failed.
_TIMEOUT = 60.0


class Reader(ABC):
    """A reader of one bucket."""

    @abstractmethod
    def list_keys(self, prefix: str) -> list[str]:
        """Return the keys of all objects that begin with a prefix."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Download an object."""


@dataclass(frozen=True)
class S3Reader(Reader):
    """A reader of a bucket with the API of S3. It signs as the documentation of AWS's signature version 4 says."""

    url: str
    access_key: str
    secret_key: str

    def list_keys(self, prefix: str) -> list[str]:
        """See :class:`Reader`."""
        keys: list[str] = []
        query = {"list-type": "2", "prefix": prefix}
        while True:
            page = ET.fromstring(self._get("", query))  # noqa: S314 - the answer of a server of the campaign
            keys += (key.text or "" for contents in page.iterfind("{*}Contents") for key in contents.iterfind("{*}Key"))
            token = page.findtext("{*}NextContinuationToken")
            if not token:
                return keys
            query["continuation-token"] = token

    def read(self, key: str) -> bytes:
        """See :class:`Reader`."""
        return self._get("/" + key, {})

    def _get(self, path: str, parameters: Mapping[str, str]) -> bytes:
        address, now = urlsplit(self.url + quote(path)), datetime.now(UTC)
        query, headers = (
            urlencode(sorted(parameters.items()), quote_via=quote),
            {
                "host": address.netloc,
                "x-amz-content-sha256": hashlib.sha256().hexdigest(),
                "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ"),
            },
        )
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        signed = ";".join(headers)
        request = "\n".join(("GET", address.path, query, lines, signed, headers["x-amz-content-sha256"]))
        scope = (now.strftime("%Y%m%d"), "us-east-1", "s3", "aws4_request")
        text = (
            "AWS4-HMAC-SHA256",
            headers["x-amz-date"],
            "/".join(scope),
            hashlib.sha256(request.encode()).hexdigest(),
        )
        key = f"AWS4{self.secret_key}".encode()
        for part in (*scope, "\n".join(text)):
            key = hmac.digest(key, part.encode(), "sha256")
        credential = f"Credential={self.access_key}/{'/'.join(scope)}"
        headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={signed}, Signature={key.hex()}"
        return _download(f"{self.url}{quote(path)}{'?' if query else ''}{query}", headers)


@dataclass(frozen=True)
class AzureReader(Reader):
    """A reader of a container of Azure Blob Storage that can be read by all."""

    url: str

    def list_keys(self, prefix: str) -> list[str]:
        """See :class:`Reader`."""
        return [*self._list_keys(prefix)]

    def read(self, key: str) -> bytes:
        """See :class:`Reader`."""
        return _download(f"{self.url}/{quote(key)}", {})

    def _list_keys(self, prefix: str) -> Iterator[str]:
        query = {"restype": "container", "comp": "list", "prefix": prefix}
        while True:
            answer = _download(f"{self.url}?{urlencode(query)}", {}).decode("utf-8-sig")
            page = ET.fromstring(answer)  # noqa: S314 - the answer of a server of the campaign
            yield from (blob.findtext("Name") or "" for blob in page.iterfind("Blobs/Blob"))
            query["marker"] = page.findtext("NextMarker") or ""
            if not query["marker"]:
                return


def _download(url: str, headers: Mapping[str, str]) -> bytes:
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 - a server of the campaign
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:  # noqa: S310
        data: bytes = answer.read()
    return data
