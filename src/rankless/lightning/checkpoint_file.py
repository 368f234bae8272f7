"""A checkpoint of any format as a file of Lightning in memory, for functions that open files only.

``load_from_checkpoint`` makes one, in one process.
"""

from __future__ import annotations

import io
from os import PathLike

import torch

from rankless.conversion.state_dict_schemas import lightning_schema
from rankless.lightning.checkpoint_dict import ResumedCheckpoint
from rankless.storage.location import parse_location


def read_as_file(path: str | PathLike[str]) -> io.BytesIO:
    """Return a file with the model and the own values of a checkpoint. Raises as :func:`rankless.open` does."""
    checkpoint = ResumedCheckpoint.open_path(parse_location(path))
    file = io.BytesIO()
    torch.save(lightning_schema({"model": checkpoint.read_model()}, {"user_content": checkpoint.content}), file)
    file.seek(0)
    return file
