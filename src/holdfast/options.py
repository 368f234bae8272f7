"""The keyword arguments of :func:`holdfast.restore` as a type, for calls that pass them on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from holdfast.observe.events import OnEvent


class RestoreOptions(TypedDict, total=False):
    """The optional arguments of a load. :func:`holdfast.restore` documents each of them."""

    dataloader: Any
    stateful: Mapping[str, Any] | None
    strict: bool
    allow_missing: Collection[str]
    verify: bool
    rng: bool | None
    cast_dtype: bool
    share_reads: str
    on_corruption: str
    keys: Mapping[str, str] | None
    on_event: OnEvent | None
