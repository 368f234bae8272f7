"""The formats of other systems that rankless reads and writes, by name.

A format that belongs to one system (NxD, ColossalAI) is in a package of its own above this one. It is named here by its
module, so that nothing below imports it, and a program that does not meet the format never loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rankless.formats.reader import Reader


@dataclass(frozen=True)
class ReadableFormat:
    """A format that can be read.

    ``detect`` names the function that says whether a path has this format, as ``"module:function"``. ``reader`` names
    the class or function that opens it, given a path and the ``keys`` of :func:`rankless.formats.detect.open_reader`.
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
        "rankless.formats.accelerate.folder_parts:is_training_folder",
        "rankless.formats.accelerate.open_folder:open_training_folder",
    ),
    DEEPSPEED: ReadableFormat(
        "rankless.formats.deepspeed.tags:is_deepspeed", "rankless.formats.deepspeed.deepspeed_reader:DeepSpeedReader"
    ),
    MEGATRON: ReadableFormat(
        "rankless.formats.megatron.folder:is_megatron", "rankless.formats.megatron.megatron_reader:MegatronReader"
    ),
    "lightning-folder": ReadableFormat(
        "rankless.formats.lightning:is_lightning", "rankless.formats.lightning:LightningReader"
    ),
    "dcp": ReadableFormat("rankless.formats.dcp.folder:is_dcp", "rankless.formats.dcp.dcp_reader:DcpReader"),
    "dcp-hf-shards": ReadableFormat(
        "rankless.formats.dcp.hf_shards:is_sharded", "rankless.formats.dcp.hf_shards:ShardsReader"
    ),
    "peft": ReadableFormat("rankless.formats.peft:is_peft", "rankless.formats.peft:PeftReader"),
    "torch": ReadableFormat("rankless.formats.torch_file:is_torch_file", "rankless.formats.torch_file:TorchFileReader"),
    NXD: ReadableFormat(
        "rankless.compat.nxd.format.nxd_reader:is_nxd", "rankless.compat.nxd.format.nxd_reader:NxdReader"
    ),
}

#: Targets of a conversion that belong to one system: the class or function that writes them.
TARGETS: Mapping[str, str] = {
    "colossalai": "rankless.compat.colossalai.target:ColossalaiTarget",
    MEGATRON: "rankless.conversion.megatron.target:MegatronTarget",
    NXD: "rankless.compat.nxd.convert.operation:convert_to_nxd",
}


def load_attribute(path: str) -> Any:
    """Return the class or function at ``"module:name"``. The module is imported if it was not."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def load_target(name: str) -> Any:
    """Return the class or function that writes a format of :data:`TARGETS`."""
    return load_attribute(TARGETS[name])
