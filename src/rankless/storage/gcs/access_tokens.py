"""Access tokens of requests to Google Cloud Storage, from a function or from Google's own library.

:class:`~rankless.storage.gcs.gcs_dialect.GCSService` asks for them before each attempt of a request, in the thread that
sends. No message may contain a token.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rankless.errors import InvalidArgumentError, StorageError
from rankless.storage.http.settings import call_credentials, is_header_text

#: A function that returns an access token. It is called for each request, so it should keep the token in memory.
TokenFunction = Callable[[], str]

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)

_ADVICE = (
    "set GOOGLE_APPLICATION_CREDENTIALS, run 'gcloud auth application-default login', give this host a service "
    "account, or pass credentials= to rankless.GCS"
)


def check_key_file(given: object) -> str:
    """Return the path of a key file as a text. Raises ``InvalidArgumentError``, which does not contain a key."""
    if not isinstance(given, str | os.PathLike) or str(given).lstrip().startswith("{"):
        raise InvalidArgumentError(
            "credentials must be the path of the key file of a service account, or a function that returns a token"
        )
    return str(given)


class AccessTokens:
    """The headers that authenticate requests, for all threads of a process, and those that it forks.

    Without credentials, the Application Default Credentials of Google's tools are used.
    """

    def __init__(self, credentials: str | TokenFunction | None) -> None:
        self._credentials = credentials
        # A forked process has its own: a lock or a connection of its parent may be in use at that moment.
        self._by_process: dict[int, _GoogleCredentials] = {}

    def headers(self) -> Mapping[str, str]:
        """Return the headers of a request. Raises ``StorageError`` if there are no credentials."""
        if not callable(self._credentials):
            return self._of_process(self._credentials).headers()
        token = call_credentials(self._credentials)
        if not isinstance(token, str) or not is_header_text(token):
            raise StorageError(errno.EACCES, "the function in credentials must return a token, a text of one line")
        return {"authorization": f"Bearer {token}"} if token else {}

    def forget_token(self) -> None:
        """Get a new token for the next request, because the server has refused this one."""
        if not callable(self._credentials):
            self._of_process(self._credentials).forget_token()

    def _of_process(self, file: str | None) -> _GoogleCredentials:
        return self._by_process.setdefault(os.getpid(), _GoogleCredentials(file))


class _GoogleCredentials:
    """Credentials of the library google-auth, from a file of a service account, or as Google's tools find them."""

    def __init__(self, file: str | None) -> None:
        self._file, self._lock = file, threading.Lock()
        self._loaded: Any = None
        self._is_refused = False

    def headers(self) -> Mapping[str, str]:
        """Return the headers of a request, with a token that is valid for some minutes."""
        headers: dict[str, str] = {}
        with self._lock:
            if self._loaded is None:
                self._loaded = _load_credentials(self._file)
            if self._is_refused or not self._loaded.valid:
                _refresh(self._loaded)
                self._is_refused = False
            self._loaded.apply(headers)
        return headers

    def forget_token(self) -> None:
        """Get a new token for the next request."""
        self._is_refused = True


def _load_credentials(file: str | None) -> Any:
    try:
        import google.auth.exceptions  # noqa: PLC0415 - an optional library
        from google.oauth2 import service_account  # noqa: PLC0415
    except ImportError as error:
        raise StorageError(
            errno.EACCES,
            "the credentials of Google's tools need the library google-auth: run pip install 'google-auth[requests]', "
            "or pass credentials= to rankless.GCS, a function that returns a token",
        ) from error
    try:
        if file is None:
            return google.auth.default(scopes=_SCOPES)[0]
        return service_account.Credentials.from_service_account_file(file, scopes=_SCOPES)  # type: ignore[no-untyped-call]
    except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:
        raise _refuse(error) from error


def _refresh(credentials: Any) -> None:
    """Get a new token. Raises ``ConnectionError`` for a failure that may be over at the next attempt."""
    import google.auth.exceptions  # noqa: PLC0415 - an optional library
    from google.auth.transport.requests import Request  # noqa: PLC0415

    try:
        credentials.refresh(Request())
    except google.auth.exceptions.GoogleAuthError as error:
        if error.retryable or isinstance(error, google.auth.exceptions.TransportError):
            raise ConnectionError(f"no token for the object store: {error}") from error
        raise _refuse(error) from error


def _refuse(error: Exception) -> StorageError:
    return StorageError(errno.EACCES, f"no token for Google Cloud Storage was found: {_ADVICE} ({error})")
