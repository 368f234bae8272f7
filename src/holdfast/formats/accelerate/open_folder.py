"""Opening a folder of Accelerate or the ``Trainer``: all of it, or its PEFT adapters and the other parts."""

from __future__ import annotations

from pathlib import Path

from holdfast.formats.accelerate.folder_parts import list_parts
from holdfast.formats.accelerate.training_reader import TrainingReader
from holdfast.formats.composite_reader import CompositeReader
from holdfast.formats.peft import PeftReader, is_peft
from holdfast.formats.reader import Reader
from holdfast.formats.sharded.model_files import MODEL


def open_training_folder(path: Path) -> Reader:
    """Return the reader for a folder. Raises ``FormatError`` or ``CorruptCheckpointError``."""
    parts = list_parts(path)
    if MODEL not in parts and is_peft(path):
        return CompositeReader(path, [PeftReader(path, {}), TrainingReader(path, parts, elsewhere={MODEL})])
    return TrainingReader(path, parts)
