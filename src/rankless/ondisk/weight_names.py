"""The names of the files with a model's weights in folders of Hugging Face's libraries: transformers and diffusers.

Exports and conversions name files so, and the reader of Hugging Face's layout looks for them. Other libraries open
files by these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec
from msgspec.structs import replace

from rankless.ondisk.data_files import DataFile

#: The stems of the files of safetensors and of torch.save, by library.
TRANSFORMERS, DIFFUSERS = ("model", "pytorch_model"), ("diffusion_pytorch_model", "diffusion_pytorch_model")

#: The member that the configuration of a model has in diffusers.
_VERSION = "_diffusers_version"


def find_stems(config: bytes) -> tuple[str, str]:
    """Return the stems of the weights that belong to a ``config.json``, which may be empty or of any origin."""
    try:
        content = msgspec.json.decode(config)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        content = None
    return DIFFUSERS if isinstance(content, dict) and _VERSION in content else TRANSFORMERS


def index_and_single(stem: str, form: str = "safetensors") -> tuple[str, str]:
    """Return the names of the index and of the single file with a stem."""
    return f"{stem}.{form}.index.json", f"{stem}.{form}"


def rename_weights(files: Sequence[DataFile], stem: str) -> list[DataFile]:
    """Return the files of a model with another stem than transformers' ``model``.

    For example, with the stem ``diffusion_pytorch_model`` the file ``model-00001-of-00002.safetensors`` becomes
    ``diffusion_pytorch_model-00001-of-00002.safetensors``.
    """
    paths = [PurePosixPath(file.path) for file in files]
    names = [stem + path.name.removeprefix(TRANSFORMERS[0]) for path in paths]
    return [replace(file, path=str(path.with_name(name))) for file, path, name in zip(files, paths, names, strict=True)]
