"""Opening a folder of Accelerate or the ``Trainer``. DeepSpeed or PEFT may have written a part of it.

``formats/registry.py`` names it: each rank of a load or conversion calls it. A folder must be refused if only a part of
it was copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankless.accelerate.reader.folder_parts import list_parts
from rankless.accelerate.reader.training_reader import TrainingReader
from rankless.deepspeed.reader.deepspeed_file_names import list_tag_files
from rankless.deepspeed.reader.deepspeed_reader import DeepSpeedReader
from rankless.deepspeed.reader.tag_folders import find_tag, is_deepspeed, list_tags
from rankless.errors import CorruptCheckpointError, InvalidArgumentError
from rankless.formats.composite_reader import CompositeReader
from rankless.formats.peft import PeftReader, is_peft
from rankless.formats.reader import Reader
from rankless.formats.sharded.model_files import MODEL, OPTIMIZER


def open_training_folder(path: Path, keys: Mapping[str, str]) -> Reader:
    """Return the reader for a folder; ``keys`` are DeepSpeed's.

    Raises ``FormatError``, ``CorruptCheckpointError`` if only a part of the folder was copied, or
    ``InvalidArgumentError`` if there are keys, but no files of DeepSpeed.
    """
    parts = list_parts(path)
    if keys and not is_deepspeed(path):
        raise InvalidArgumentError(
            f"keys: {', '.join(keys)} would have no effect: {path} is a folder of Accelerate or the Trainer without "
            "files of DeepSpeed, whose components are found by the names of their files; leave keys out"
        )
    if is_deepspeed(path):
        optimizers = len(list_tag_files(find_tag(path)).optimizers)
        deepspeed = DeepSpeedReader(path, keys)
        others = TrainingReader(path, parts, {MODEL, OPTIMIZER}, writers=optimizers, optimizer=deepspeed)
        return CompositeReader(path, [deepspeed, others])
    if tags := list_tags(path):
        raise CorruptCheckpointError(
            f"{path} has files of DeepSpeed in {tags[0]}, but not the file 'latest' that names this folder: it was not "
            f"copied. Write {tags[0]} into it, or open {path / tags[0]}, which has the model and the optimizer"
        )
    if MODEL not in parts and is_peft(path):
        return CompositeReader(path, [PeftReader(path, {}), TrainingReader(path, parts, elsewhere={MODEL})])
    return TrainingReader(path, parts)
