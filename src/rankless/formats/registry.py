"""The formats of other systems that rankless reads and writes, by name.

The code of each system is in a package of its own above all others, with ``reader``, ``writer`` and the functions that
a training calls. It is named here by its module: this is the only way from the core to it, and a program that does not
meet the format never imports it.

:mod:`rankless.formats.detect_foreign` tries :data:`READABLE` in its order, on each rank; :mod:`rankless.run.ownership`
asks for :data:`PROOFS`, conversions for :data:`TARGETS`. The names are arguments of ``convert(to=)`` and in
``Reader.format``: users know them.
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
    ``marker`` is the file that shows ``detect`` the format, where there is one.
    """

    detect: str
    reader: str
    marker: str | None = None

    def is_at(self, path: Path) -> bool:
        """Return whether ``path`` has this format."""
        return bool(load_attribute(self.detect)(path))

    def open(self, path: Path, keys: Mapping[str, str]) -> Reader:
        """Return a reader for ``path``. Raises ``FormatError``."""
        reader: Reader = load_attribute(self.reader)(path, keys)
        return reader


#: NxD's format, as it is named in ``convert(to=)``.
NXD = "nxd"

#: The formats that an edit cannot be written as: they are written from a native checkpoint.
NOT_FOR_EDITS = frozenset({NXD, "peft"})

#: The folders of Accelerate and of transformers' ``Trainer``. They may have files of DeepSpeed or PEFT in them.
ACCELERATE = "accelerate"

#: DeepSpeed's format. Its folders may have files of other formats next to it, such as a model of transformers.
DEEPSPEED = "deepspeed"

#: DeepSpeed's universal checkpoints, as they are named in ``convert(to=)``.
DEEPSPEED_UNIVERSAL = "deepspeed-universal"

#: Megatron's format.
MEGATRON = "megatron"

#: Megatron's layout with the names and tensors of transformers.
MEGATRON_HF = "hf"

#: The format of ``torch.distributed.checkpoint``.
DCP = "dcp"

#: Lightning's folders: DCP's folders with one more file.
LIGHTNING_FOLDER = "lightning-folder"

#: The key that says how NxD divides parameters among tensor-parallel ranks, and which names Megatron's tensors get.
LAYOUT = "layout"

#: Formats that can be read. They are tried in this order.
READABLE: Mapping[str, ReadableFormat] = {
    ACCELERATE: ReadableFormat(
        "rankless.accelerate.reader.folder_parts:is_training_folder",
        "rankless.accelerate.reader.open_folder:open_training_folder",
    ),
    DEEPSPEED: ReadableFormat(
        "rankless.deepspeed.reader.tag_folders:is_deepspeed",
        "rankless.deepspeed.reader.deepspeed_reader:DeepSpeedReader",
    ),
    MEGATRON: ReadableFormat(
        "rankless.megatron.reader.megatron_directory:is_megatron",
        "rankless.megatron.reader.megatron_reader:MegatronReader",
    ),
    LIGHTNING_FOLDER: ReadableFormat(
        "rankless.lightning.reader:is_lightning", "rankless.lightning.reader:LightningReader", "meta.pt"
    ),
    DCP: ReadableFormat(
        "rankless.dcp.reader.dcp_directory:is_dcp", "rankless.dcp.reader.dcp_reader:DcpReader", ".metadata"
    ),
    "dcp-hf-shards": ReadableFormat(
        "rankless.dcp.reader.hf_shards:is_sharded", "rankless.dcp.reader.hf_shards:ShardsReader"
    ),
    "peft": ReadableFormat("rankless.formats.peft:is_peft", "rankless.formats.peft:PeftReader"),
    "torch": ReadableFormat("rankless.formats.torch_file:is_torch_file", "rankless.formats.torch_file:TorchFileReader"),
    "weights": ReadableFormat(
        "rankless.formats.weights.version_files:is_version", "rankless.formats.weights.version_reader:open_version"
    ),
    NXD: ReadableFormat("rankless.nxd.reader.nxd_reader:is_nxd", "rankless.nxd.reader.nxd_reader:NxdReader"),
}

#: What proves that a path is an output of one system or component, which such a save may replace: the function that
#: returns the names of the files there that belong to the output, or ``None`` if it is none.
PROOFS: Mapping[str, str] = {
    DCP: "rankless.dcp.reader.dcp_directory:find_owned_files",
    "lightning": "rankless.lightning.reader:find_owned_files",
    "fabric": "rankless.lightning.reader:find_owned_files_of_fabric",
    "scheduler": "rankless.components.scheduler_file:find_owned_files",
}

#: Targets of a conversion that belong to one system: the class or function that writes them.
TARGETS: Mapping[str, str] = {
    "colossalai": "rankless.colossalai.writer:ColossalaiTarget",
    DCP: "rankless.dcp.writer.dcp_target:DcpTarget",
    DEEPSPEED_UNIVERSAL: "rankless.deepspeed.writer.universal_target:UniversalTarget",
    LIGHTNING_FOLDER: "rankless.lightning.writer:LightningTarget",
    MEGATRON: "rankless.megatron.writer.megatron_target:MegatronTarget",
    NXD: "rankless.nxd.writer.nxd_target:convert_to_nxd",
}


#: The class that reads the checksums of the records in a folder of DCP.
DCP_RECORD_CHECKSUMS = "rankless.dcp.reader.record_checksums:RecordChecksumIndex"


def load_attribute(path: str) -> Any:
    """Return the class or function at ``"module:name"``. The module is imported if it was not."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def load_target(name: str) -> Any:
    """Return the class or function that writes a format of :data:`TARGETS`."""
    return load_attribute(TARGETS[name])
