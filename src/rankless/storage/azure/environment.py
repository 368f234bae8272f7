"""The environment variables of Azure's tools.

:mod:`rankless.storage.azure.azure_store` reads them on each rank, when a URL is parsed or credentials are needed.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from rankless.errors import InvalidArgumentError, RanklessError, StorageError


class Settings(NamedTuple):
    """The first arguments of ``Azure``."""

    account: str
    endpoint: str | None
    credentials: str | None


def read_environment(variables: Mapping[str, str]) -> Settings:
    """Return the account, the endpoint and the credentials that environment variables describe.

    Raises ``StorageError`` if no account is named, ``InvalidArgumentError`` if the connection string is wrong.
    """
    if connection := variables.get("AZURE_STORAGE_CONNECTION_STRING"):
        return parse_connection_string(connection)
    account = variables.get("AZURE_STORAGE_ACCOUNT")
    if not account:
        raise StorageError(
            errno.EINVAL,
            "az:// needs the name of a storage account: set AZURE_STORAGE_ACCOUNT, and AZURE_STORAGE_KEY or "
            "AZURE_STORAGE_SAS_TOKEN, or set AZURE_STORAGE_CONNECTION_STRING, or make the path with rankless.Azure",
        )
    credentials = variables.get("AZURE_STORAGE_KEY") or variables.get("AZURE_STORAGE_SAS_TOKEN") or None
    return Settings(account, None, credentials)


def find_credentials(variables: Mapping[str, str], account: str) -> str | None:
    """Return the credentials of an account that environment variables describe; ``None`` if there are none."""
    try:
        settings = read_environment(variables)
    except RanklessError:
        return None
    return settings.credentials if settings.account == account else None


def parse_connection_string(text: str) -> Settings:
    """Return the settings in a connection string such as ``AccountName=…;AccountKey=…``.

    Raises ``InvalidArgumentError`` if it names no account.
    """
    fields = {name.strip().lower(): value for name, _, value in (part.partition("=") for part in text.split(";"))}
    endpoint = fields.get("blobendpoint")
    account = fields.get("accountname") or (urlsplit(endpoint or "").hostname or "").partition(".")[0]
    if not account:
        raise InvalidArgumentError("the connection string of Azure Storage has no AccountName and no BlobEndpoint")
    if endpoint is None:
        protocol, suffix = fields.get("defaultendpointsprotocol"), fields.get("endpointsuffix")
        endpoint = f"{protocol or 'https'}://{account}.blob.{suffix or 'core.windows.net'}"
    return Settings(account, endpoint, fields.get("accountkey") or fields.get("sharedaccesssignature"))
