"""The formats of other systems that holdfast reads and writes, by name.

A format that belongs to one system (NxD, ColossalAI) is in a package of its own above this one. It is named here by its
module, so that nothing below imports it, and a program that does not meet the format never loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.formats.reader import Reader


@dataclass(frozen=True)
class ReadableFormat:
    """A format that can be read.

    ``detect`` names the function that says whether a path has this format, as ``"module:function"``. ``reader`` names
    the class or function that opens it, given a path and the ``keys`` of :func:`holdfast.formats.detect.open_reader`.
    """

    detect: str
    reader: str

    def is_at(self, path: Path) -> bool:
        """Return whether ``path`` has this format."""
        return bool(load_attribute(self.detect)(path))

    def open(self, path: Path, keys: Mapping[str, str]) -> Reader:
        """Return a reader for ``path``. Raises ``FormatError``."""
        reader: Reader = load_attribute(self.reader)(path, keys)
        return reader


#: NxD's format, as it is named in ``convert(to=)``.
NXD = "nxd"

#: The folders of Accelerate and of transformers' ``Trainer``. They may have files of DeepSpeed or PEFT in them.
ACCELERATE = "accelerate"

#: DeepSpeed's format. Its folders may have files of other formats next to it, such as a model of transformers.
DEEPSPEED = "deepspeed"

#: Megatron's format.
MEGATRON = "megatron"

#: Megatron's layout with the names and tensors of transformers.
MEGATRON_HF = "hf"

#: The key that says how NxD divides parameters among tensor-parallel ranks, and which names Megatron's tensors get.
LAYOUT = "layout"

#: Formats that can be read, in the order in which they are tried.
READABLE: Mapping[str, ReadableFormat] = {
    ACCELERATE: ReadableFormat(
        "holdfast.formats.accelerate.folder_parts:is_training_folder",
        "holdfast.formats.accelerate.open_folder:open_training_folder",
    ),
    DEEPSPEED: ReadableFormat(
        "holdfast.formats.deepspeed.tags:is_deepspeed", "holdfast.formats.deepspeed.deepspeed_reader:DeepSpeedReader"
    ),
    MEGATRON: ReadableFormat(
        "holdfast.formats.megatron.folder:is_megatron", "holdfast.formats.megatron.megatron_reader:MegatronReader"
    ),
    "lightning-folder": ReadableFormat(
        "holdfast.formats.lightning:is_lightning", "holdfast.formats.lightning:LightningReader"
    ),
    "dcp": ReadableFormat("holdfast.formats.dcp.folder:is_dcp", "holdfast.formats.dcp.dcp_reader:DcpReader"),
    "dcp-hf-shards": ReadableFormat(
        "holdfast.formats.dcp.hf_shards:is_sharded", "holdfast.formats.dcp.hf_shards:ShardsReader"
    ),
    "peft": ReadableFormat("holdfast.formats.peft:is_peft", "holdfast.formats.peft:PeftReader"),
    "torch": ReadableFormat("holdfast.formats.torch_file:is_torch_file", "holdfast.formats.torch_file:TorchFileReader"),
    NXD: ReadableFormat(
        "holdfast.compat.nxd.format.nxd_reader:is_nxd", "holdfast.compat.nxd.format.nxd_reader:NxdReader"
    ),
}

#: Targets of a conversion that belong to one system: the class or function that writes them.
TARGETS: Mapping[str, str] = {
    "colossalai": "holdfast.compat.colossalai.target:ColossalaiTarget",
    MEGATRON: "holdfast.conversion.megatron.target:MegatronTarget",
    NXD: "holdfast.compat.nxd.convert.operation:convert_to_nxd",
}


def load_attribute(path: str) -> Any:
    """Return the class or function at ``"module:name"``. The module is imported if it was not."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def load_target(name: str) -> Any:
    """Return the class or function that writes a format of :data:`TARGETS`."""
    return load_attribute(TARGETS[name])
