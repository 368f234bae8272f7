"""The conversion target ``peft``: the adapters of a checkpoint, in folders as PEFT stores them.

A conversion makes one on every rank: see :class:`rankless.conversion.target.ConversionTarget`.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from rankless.conversion.native_target import NativeTarget
from rankless.conversion.target import ConversionSource
from rankless.errors import InvalidArgumentError
from rankless.formats.peft import PeftReader
from rankless.formats.reader import Reader
from rankless.ondisk.data_files import ADAPTER, ADAPTER_CONFIG


class PeftTarget(NativeTarget):
    """A folder that ``PeftModel.from_pretrained`` opens. It contains only adapters."""

    output_name = ADAPTER

    def __init__(self, source: ConversionSource, pending: Path, final: Path) -> None:
        if not source.selected.infos:
            raise InvalidArgumentError(
                f"{source.reader.path} contains no adapters in PEFT's format: load it into its PEFT model, and save "
                "that with rankless.save_model(adapter_only=True)"
            )
        super().__init__(source, pending, final)

    def adapter_files(self) -> dict[str, bytes]:
        """Return the configurations of the adapters, without the base model's."""
        files = super().adapter_files()
        return {name: data for name, data in files.items() if PurePosixPath(name).name == ADAPTER_CONFIG}

    def open_reader(self) -> Reader:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        return PeftReader(self._files.folder / self.output_name, {})
