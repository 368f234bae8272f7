"""The dialect of Google Cloud Storage: addresses of buckets, access tokens, and codes of errors.

:class:`~rankless.storage.http.client.ObjectClient` asks it for each attempt of a request, in several threads at a time.
"""

from __future__ import annotations

from http import HTTPStatus

from rankless.storage.gcs.access_tokens import AccessTokens, TokenFunction
from rankless.storage.http.client import ObjectRequest
from rankless.storage.http.connection import Address, HttpRequest, HttpResponse, make_target, parse_address
from rankless.storage.http.xml import find_error_code
from rankless.storage.object_path import ObjectPath


class GCSService:
    """One endpoint. Buckets are in the paths of requests, so that their names may have dots."""

    transient_codes = frozenset({"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"})
    header_of_all_answers = None  # none is documented

    def __init__(self, endpoint: str, credentials: str | TokenFunction | None, project: str | None) -> None:
        self._address = parse_address(endpoint)
        self._tokens = AccessTokens(credentials)
        self._project = {"x-goog-user-project": project} if project else {}

    def address_of(self, path: ObjectPath) -> Address:  # noqa: ARG002 - the same for all
        """See :class:`~rankless.storage.http.client.ObjectService`."""
        return self._address

    def sign_request(self, request: ObjectRequest) -> HttpRequest:
        """See :class:`~rankless.storage.http.client.ObjectService`."""
        headers = {**dict(request.headers), **self._tokens.headers(), **self._project}
        target = make_target("/" + "/".join(request.path.parts[1:]), request.query)
        return HttpRequest(request.method, target, headers, request.body, request.into, request.limit)

    def error_code(self, request: ObjectRequest, response: HttpResponse) -> str:
        """See :class:`~rankless.storage.http.client.ObjectService`."""
        return find_error_code(request.method, response.status, response.body)

    def adapt_to(self, path: ObjectPath, response: HttpResponse, code: str) -> bool:  # noqa: ARG002
        """Get a new token if this one has been refused."""
        if response.status != HTTPStatus.UNAUTHORIZED:
            return False
        self._tokens.forget_token()
        return True
