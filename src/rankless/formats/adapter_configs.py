"""The configurations of PEFT's adapters, which a checkpoint has in addition to tensors.

Rank 0 of a load compares adapters with it, in the vote "reading the metadata"; exports and conversions copy the files.
"""

from __future__ import annotations

from rankless.formats.native import NativeReader
from rankless.formats.reader import Reader
from rankless.ondisk.data_files import is_adapter_group


def read_adapter_configs(reader: Reader) -> dict[str, bytes]:
    """Return the configurations of adapters and of their base models, by their paths in a checkpoint of rankless.

    Raises ``CorruptCheckpointError`` if one does not match its checksum. PEFT's own folders have no checksums.
    """
    if isinstance(reader, NativeReader):
        names = [name for name in reader.manifest.files if is_adapter_group(name) and name.endswith(".json")]
        return {name: reader.read_small_file(name) for name in names}
    from rankless.formats.peft import read_foreign_adapter_configs  # noqa: PLC0415 - imports the readers of torch files

    return read_foreign_adapter_configs(reader)
