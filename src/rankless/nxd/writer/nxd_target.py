"""The conversion to NxD's format: rank 0 plans and writes, the other ranks wait.

:func:`rankless.convert` calls it on every rank; it is the vote "converting".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rankless.conversion.pipeline import ConversionRequest
from rankless.engine.comm.session import Session
from rankless.errors import InvalidArgumentError
from rankless.formats.reader import detect_replacement
from rankless.formats.registry import LAYOUT, NXD
from rankless.nxd.writer.nxd_files import NxdWriter
from rankless.nxd.writer.nxd_options import NxdOptions
from rankless.run.unpublished_output import pending_directory
from rankless.state.optimizer.left_out_values import warn_if_left_out


def convert_to_nxd(request: ConversionRequest, session: Session, options: Mapping[str, Any]) -> Path:
    """Write a checkpoint in NxD's format. On failure nothing is left, and all ranks raise the same error.

    ``options`` are the fields of :class:`~rankless.nxd.writer.nxd_options.NxdOptions`. Raises ``InvalidArgumentError``
    for invalid ones.
    """
    nxd_options = _check_options(options)

    def plan_and_write() -> bytes:
        request.check_arguments()
        nxd_options.check_values()
        source = request.open_source()
        warn_if_left_out(source.carried.shared, f"the format {NXD!r}")
        with detect_replacement(source.reader):
            writer = NxdWriter(source, nxd_options)
            with pending_directory(request.final) as pending:
                writer.write_checkpoint(pending)
        return b""

    session.vote("converting", lambda: None, lambda _: b"", lambda _: plan_and_write())
    return request.final


def _check_options(given: Mapping[str, Any]) -> NxdOptions:
    """Return the options as an object. Raises ``InvalidArgumentError`` for unknown ones."""
    names = {field.name for field in fields(NxdOptions)}
    unknown = given.keys() - names
    if unknown:
        valid = ", ".join(sorted(names - {LAYOUT}))
        raise InvalidArgumentError(f"format {NXD!r} has the options {valid}; got {', '.join(unknown)}")
    return NxdOptions(**given)
