"""Credentials of Azure Storage, and the part that each kind adds to a request: a signature, a query, or a token.

:class:`~rankless.storage.azure.azure_dialect.AzureService` signs each attempt of a request with it, in the thread that
sends. No message may contain a secret.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qsl

from rankless.errors import InvalidArgumentError, StorageError
from rankless.storage.body import count_bytes
from rankless.storage.http.connection import HttpRequest, HttpResponse
from rankless.storage.http.settings import call_credentials, is_header_text

#: A function that returns a token of Microsoft Entra ID. It is called for each request, so it should keep it in memory.
TokenFunction = Callable[[], str]

#: The permission that tokens are asked for.
_SCOPE = "https://storage.azure.com/.default"

#: The headers that are part of a signature by their place, not by their name. The header ``Date`` is never sent.
_SIGNED = (
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)

#: The least difference between two clocks that may be the reason of a refusal.
_CLOCK_TOLERANCE = timedelta(minutes=1)


def check_credentials(given: object) -> str | TokenFunction | None:
    """Return credentials, without spaces around. Raises ``InvalidArgumentError``, which contains none of them."""
    if given is None or callable(given):
        return given
    text = given.strip() if isinstance(given, str) else ""  # a file ends with a line break
    try:
        is_valid = bool(text if is_sas(text) else base64.b64decode(text, validate=True))
    except ValueError:
        is_valid = False
    if not is_valid or not is_header_text(text) or " " in text:
        raise InvalidArgumentError(
            "credentials must be a key of the account in base64, a shared access signature, or a function"
        )
    return text


class AzureSigner(Protocol):
    """One kind of credentials."""

    def sign(self, request: HttpRequest) -> HttpRequest:
        """Return the request with the proof that it is allowed. Raises ``StorageError`` if there are no credentials."""

    def adapt_to(self, response: HttpResponse, code: str) -> bool:
        """Learn from a refusal how to make the next attempt right. Return false if there is nothing to learn."""


def make_signer(account: str, credentials: str | TokenFunction | None) -> AzureSigner:
    """Return the signer for an account key, a shared access signature, a function, or Azure's tools."""
    if not isinstance(credentials, str):
        return BearerSigner(credentials)
    return SasSigner(credentials) if is_sas(credentials) else SharedKeySigner(account, base64.b64decode(credentials))


def is_sas(credentials: str) -> bool:
    """Return whether credentials are a shared access signature, which is a query: no key has such a character."""
    return "&" in credentials


class SharedKeySigner:
    """Signs with the key of the account."""

    def __init__(self, account: str, key: bytes) -> None:
        self._account, self._key = account, key
        #: How much the server's clock is ahead of this host's clock.
        self._clock_offset = timedelta()

    def sign(self, request: HttpRequest) -> HttpRequest:
        """See :class:`AzureSigner`."""
        date = format_datetime(datetime.now(UTC) + self._clock_offset, usegmt=True)
        dated = replace(request, headers={**request.headers, "x-ms-date": date})
        digest = hmac.digest(self._key, text_to_sign(self._account, dated).encode(), hashlib.sha256)
        authorization = f"SharedKey {self._account}:{base64.b64encode(digest).decode()}"
        return replace(dated, headers={**dated.headers, "authorization": authorization})

    def adapt_to(self, response: HttpResponse, code: str) -> bool:
        """See :class:`AzureSigner`. A signature with a wrong date is refused like a wrong one."""
        if code != "AuthenticationFailed" or response.date is None:
            return False
        offset = response.date - datetime.now(UTC)
        is_wrong = abs(offset - self._clock_offset) > _CLOCK_TOLERANCE
        self._clock_offset = offset
        return is_wrong


class SasSigner:
    """Adds a shared access signature to the query of each request."""

    def __init__(self, sas: str) -> None:
        self._sas = sas.removeprefix("?")

    def sign(self, request: HttpRequest) -> HttpRequest:
        """See :class:`AzureSigner`."""
        return replace(request, target=f"{request.target}{'&' if '?' in request.target else '?'}{self._sas}")

    def adapt_to(self, response: HttpResponse, code: str) -> bool:  # noqa: ARG002 - see AzureSigner
        """See :class:`AzureSigner`."""
        return False


class BearerSigner:
    """Sends a token with each request; without a function, one of ``azure-identity``."""

    def __init__(self, function: TokenFunction | None) -> None:
        self._function = function
        self._default: TokenFunction | None = None

    def sign(self, request: HttpRequest) -> HttpRequest:
        """See :class:`AzureSigner`."""
        token = self._token()
        return replace(request, headers={**request.headers, "authorization": f"Bearer {token}"})

    def adapt_to(self, response: HttpResponse, code: str) -> bool:
        """See :class:`AzureSigner`. The next attempt asks for another token."""
        is_refused = response.status == HTTPStatus.UNAUTHORIZED or code == "AuthenticationFailed"
        if is_refused:
            self._default = None
        return is_refused

    def _token(self) -> str:
        token = self._default_token() if self._function is None else call_credentials(self._function)
        if not isinstance(token, str) or not is_header_text(token):
            raise StorageError(errno.EACCES, "the function in credentials must return a token, a text of one line")
        return token

    def _default_token(self) -> str:
        self._default = self._default or _default_token_function()
        try:
            return self._default()
        except Exception as error:
            raise StorageError(errno.EACCES, _no_credentials(f"no token was given: {error}")) from error


def _default_token_function() -> TokenFunction:
    try:
        from azure.identity import DefaultAzureCredential, get_bearer_token_provider  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise StorageError(errno.EACCES, _no_credentials("azure-identity is not installed")) from error
    function: TokenFunction = get_bearer_token_provider(DefaultAzureCredential(), _SCOPE)
    return function


def _no_credentials(reason: str) -> str:
    return (
        "no credentials were found for Azure Storage: set AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_KEY or "
        "AZURE_STORAGE_SAS_TOKEN, run pip install azure-identity to use the identity of this host or of `az login`, "
        f"or pass credentials= to rankless.Azure ({reason})"
    )


def text_to_sign(account: str, request: HttpRequest) -> str:
    """Return the text to sign for a request: its HMAC-SHA256 is the signature (scheme SharedKey)."""
    nbytes = count_bytes(request.body)
    headers = {"content-length": str(nbytes) if nbytes else "", **request.headers}
    named = sorted((name, value) for name, value in headers.items() if name.startswith("x-ms-"))
    path, _, query = request.target.partition("?")
    parameters = sorted(parse_qsl(query, keep_blank_values=True))
    return "\n".join(
        (
            request.method,
            *(headers.get(name, "") for name in _SIGNED),
            *(f"{name}:{value}" for name, value in named),
            f"/{account}{path}",
            *(f"{name}:{value}" for name, value in parameters),
        )
    )
