"""The dialect of Azure Blob Storage: addresses of containers, signatures, and codes of errors.

:class:`~rankless.storage.http.client.ObjectClient` asks it for each attempt of a request, in several threads at a time.
"""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import quote

from rankless.storage.azure.azure_credentials import TokenFunction, make_signer
from rankless.storage.http.client import ObjectRequest
from rankless.storage.http.connection import Address, HttpRequest, HttpResponse, parse_address
from rankless.storage.http.xml import find_text, parse_xml
from rankless.storage.object_path import ObjectPath

#: The version of the API.
_VERSION = "2021-12-02"


class AzureService:
    """The blobs of one account."""

    transient_codes = frozenset({"ServerBusy", "InternalError", "OperationTimedOut"})
    header_of_all_answers = "x-ms-request-id"

    def __init__(self, account: str, endpoint: str | None, credentials: str | TokenFunction | None) -> None:
        self._address, self._root = split_endpoint(endpoint or f"https://{account}.blob.core.windows.net")
        self._signer = make_signer(account, credentials)

    def address_of(self, path: ObjectPath) -> Address:  # noqa: ARG002 - all containers have the same one
        """See :class:`~rankless.storage.http.client.ObjectService`."""
        return self._address

    def sign_request(self, request: ObjectRequest) -> HttpRequest:
        """See :class:`~rankless.storage.http.client.ObjectService`."""
        headers = {**dict(request.headers), "x-ms-version": _VERSION}
        return self._signer.sign(
            HttpRequest(request.method, self._target(request), headers, request.body, request.into, request.limit)
        )

    def error_code(self, request: ObjectRequest, response: HttpResponse) -> str:  # noqa: ARG002 - see ObjectService
        """See :class:`~rankless.storage.http.client.ObjectService`. A header has it too, as for ``HEAD``."""
        if response.status < HTTPStatus.MULTIPLE_CHOICES:
            return ""
        return response.headers.get("x-ms-error-code") or find_text(parse_xml(response.body), "Code")

    def adapt_to(self, path: ObjectPath, response: HttpResponse, code: str) -> bool:  # noqa: ARG002 - see ObjectService
        """See :class:`~rankless.storage.http.client.ObjectService`."""
        return self._signer.adapt_to(response, code)

    def _target(self, request: ObjectRequest) -> str:
        query = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in request.query)
        return self._quote(request.path) + (f"?{query}" if query else "")

    def url_of(self, path: ObjectPath) -> str:
        """Return the URL of an object.

        For example, ``https://account.blob.core.windows.net/container/run/manifest.json``.
        """
        return f"{self._address.scheme}://{self._address.host_header}{self._quote(path)}"

    def _quote(self, path: ObjectPath) -> str:
        return quote("/".join((self._root, *path.parts[1:])), safe="/-_.~")


def split_endpoint(url: str) -> tuple[Address, str]:
    """Return the server of a URL, and the path below which its containers are. Raises ``ValueError``.

    Emulators have the name of the account there: ``http://host:10000/account``.
    """
    scheme, separator, rest = url.rstrip("/").partition("://")
    host, slash, root = rest.partition("/")
    if {"?", "#", "@"} & {*root}:
        raise ValueError("a query or a user in an endpoint")
    return parse_address(f"{scheme}{separator}{host}"), slash + root
