"""Credentials, and signatures of requests (AWS Signature Version 4), made by AWS's own library.

:class:`~rankless.storage.s3.s3_dialect.S3Service` signs each attempt of a request with it, in the thread that sends.
:class:`~rankless.storage.s3.s3_store.S3` calls :func:`check_credentials` when it is made, and the signer calls it with
the result of a function. No message may contain a secret.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from awscrt import auth, http, io
from awscrt.exceptions import AwsCrtError

from rankless.errors import InvalidArgumentError, StorageError
from rankless.storage.http.connection import Address
from rankless.storage.http.settings import call_credentials, is_header_text

#: Seconds to wait for credentials, which may come from a service of the cloud.
_CREDENTIALS_SECONDS = 60

#: The body is not part of the signature: TLS and the CRC of the part protect it.
_UNSIGNED = "UNSIGNED-PAYLOAD"


class Credentials(NamedTuple):
    """An access key, its secret, and the token of a session, if there is one."""

    access_key: str
    secret_key: str
    token: str | None = None


#: A function that returns credentials. It is called whenever a request is signed, so it should keep them in memory.
CredentialsFunction = Callable[[], Credentials]


def check_credentials(given: object) -> Credentials | CredentialsFunction | None:
    """Return credentials in their own class. Raises ``InvalidArgumentError``, which contains none of them."""
    if given is None or callable(given):
        return given
    if isinstance(given, tuple | list) and len(given) in {2, 3}:
        key, secret, *tokens = given
        token = tokens[0] if tokens else None
        if _is_credential(key) and _is_credential(secret) and (not token or _is_credential(token)):
            return Credentials(key, secret, token or None)
    raise InvalidArgumentError(
        "credentials must be the access key, its secret, and perhaps a token, all of them texts, or a function that "
        "returns them"
    )


def _is_credential(value: object) -> bool:
    return isinstance(value, str) and bool(value) and is_header_text(value)


class AwsSigner:
    """Signs requests. Without credentials, those are used that AWS's tools find.

    These are in the environment, in a profile, or come from the container, from a web identity or from the instance.
    """

    def __init__(self, credentials: Credentials | tuple[str, ...] | CredentialsFunction | None) -> None:
        self._credentials = credentials
        self._provider: tuple[int, Any] | None = None
        #: How much the server's clock is ahead of this host's clock.
        self._clock_offset = timedelta()

    def sign(
        self, method: str, target: str, headers: Mapping[str, str], address: Address, region: str
    ) -> dict[str, str]:
        """Return the headers of a signed request. Raises ``StorageError`` if there are no credentials."""
        provider = self._current_provider()
        unsigned = http.HttpHeaders([("host", address.host_header), *headers.items()])
        request = http.HttpRequest(method, target, unsigned)
        config = auth.AwsSigningConfig(
            algorithm=auth.AwsSigningAlgorithm.V4,
            signature_type=auth.AwsSignatureType.HTTP_REQUEST_HEADERS,
            credentials_provider=provider,
            region=region,
            service="s3",
            date=datetime.now(UTC) + self._clock_offset,
            use_double_uri_encode=False,
            should_normalize_uri_path=False,
            signed_body_value=_UNSIGNED,
            signed_body_header_type=auth.AwsSignedBodyHeaderType.X_AMZ_CONTENT_SHA_256,
        )
        try:
            auth.aws_sign_request(request, config).result(_CREDENTIALS_SECONDS)
        except (AwsCrtError, RuntimeError, TimeoutError) as error:
            raise _refuse(error) from error
        signed = dict(request.headers)
        if any(char in value for value in signed.values() for char in "\r\n"):
            raise InvalidArgumentError("the credentials or headers of the object store contain a line break: remove it")
        return signed

    def set_clock(self, server_date: datetime) -> None:
        """Sign with the clock of the server from now on."""
        self._clock_offset = server_date - datetime.now(UTC)

    def forget_credentials(self) -> None:
        """Get the credentials anew, because the server says that they have expired."""
        self._provider = None

    def _current_provider(self) -> Any:
        if callable(self._credentials):
            returned = call_credentials(self._credentials)
            try:
                given = check_credentials(returned or ())
            except InvalidArgumentError as error:
                raise _refuse(error) from error
            return _make_provider(given)
        # The threads of a provider do not exist in a forked process.
        if self._provider is None or self._provider[0] != os.getpid():
            self._provider = os.getpid(), _make_provider(self._credentials)
        return self._provider[1]


def _make_provider(credentials: object) -> Any:
    if isinstance(credentials, tuple):
        return auth.AwsCredentialsProvider.new_static(*credentials)
    # The event loop of the library, which asks services of the cloud, does not exist in a forked process.
    loop = io.EventLoopGroup(1)
    return auth.AwsCredentialsProvider.new_default_chain(io.ClientBootstrap(loop, io.DefaultHostResolver(loop)))


def _refuse(error: Exception) -> StorageError:
    return StorageError(
        errno.EACCES,
        "no credentials were found for the object store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
        f"AWS_PROFILE, give this host a role, or pass credentials= to rankless.S3 ({error})",
    )
