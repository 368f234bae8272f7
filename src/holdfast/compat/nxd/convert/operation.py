"""The work of a conversion to NxD's format: the first rank plans and writes, the others wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from holdfast.compat.nxd.convert.options import NxdOptions
from holdfast.compat.nxd.convert.writer import NxdWriter
from holdfast.conversion.pipeline import ConversionRequest
from holdfast.engine.comm.session import Session
from holdfast.errors import InvalidArgumentError
from holdfast.formats.reader import detect_replacement
from holdfast.formats.registry import LAYOUT, NXD
from holdfast.run.staging_dir import staging_directory


def convert_to_nxd(request: ConversionRequest, session: Session, options: Mapping[str, Any]) -> Path:
    """Write a checkpoint of NxD's format. On failure nothing is left, and all ranks raise the same error.

    ``options`` are those of :class:`~holdfast.compat.nxd.convert.options.NxdOptions`. Raises ``InvalidArgumentError``.
    """
    checked = _check_options(options)

    def write() -> bytes:
        request.check()
        checked.check()
        material = request.material()
        with detect_replacement(material.reader):
            writer = NxdWriter(material, checked)
            with staging_directory(request.final) as staging:
                writer.write(staging)
        return b""

    session.vote("converting", lambda: None, lambda _: b"", lambda _: write())
    return request.final


def _check_options(given: Mapping[str, Any]) -> NxdOptions:
    names = {field.name for field in fields(NxdOptions)}
    unknown = given.keys() - names
    if unknown:
        known = ", ".join(sorted(names - {LAYOUT}))
        raise InvalidArgumentError(f"for {NXD!r} there are {known}, and no {', '.join(unknown)}")
    return NxdOptions(**given)
