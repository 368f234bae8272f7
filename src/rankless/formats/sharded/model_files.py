"""Finding the models and optimizers in a folder, by the names of index files and single files.

Source: transformers' ``utils/hub.py``, diffusers' ``utils/constants.py`` and ColossalAI 0.5.0's
``checkpoint_io/utils.py``. The prefix of ColossalAI is the variant of the other two: it is put before ``.json``, and
before the extension of a single file.

Readers of such folders call it, on each rank or process that opens them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rankless.errors import FormatError
from rankless.formats.sharded.index import files_named_by, two_saves_error
from rankless.storage.store import store_of

MODEL, OPTIMIZER = "model", "optimizer"

#: The subfolders that ColossalAI's training scripts make for models and optimizers, and the files next to these.
MODELING = "modeling"
_FOLDERS = (MODELING, "model", "optimizer")
SCHEDULER, CONTENT = "lr_scheduler", "user_content.pt"

_INDEX = re.compile(
    r"(?P<stem>(diffusion_)?pytorch_model|model|pytorch_optim|optimizer)\.(?P<form>bin|safetensors)\.index(\.(?P<variant>.+))?\.json"
)
_SINGLE = re.compile(
    r"(?P<stem>pytorch_model(?=.*\.bin)|model(?=.*\.safetensors)|diffusion_pytorch_model)"
    r"(\.(?P<variant>(?!safetensors|bin)[^-]+))?\.(?P<form>bin|safetensors)"
)

_KINDS = {
    "pytorch_model": MODEL,
    "diffusion_pytorch_model": MODEL,
    "model": MODEL,
    "pytorch_optim": OPTIMIZER,
    "optimizer": OPTIMIZER,
}


class ModelFile(NamedTuple):
    """An index or a single file.

    ``kind`` is ``model`` or ``optimizer``, ``variant`` is empty if there is none, ``form`` is the extension of the
    tensor files: ``bin`` or ``safetensors``.
    """

    kind: str
    variant: str
    form: str
    path: Path

    @property
    def is_index(self) -> bool:
        """True for an index, False for a single file."""
        return self.path.suffix == ".json"


def parse_file_name(path: Path) -> ModelFile | None:
    """Return a file's kind, variant and form by its name, or ``None`` if it has another name."""
    match = _INDEX.fullmatch(path.name) or _SINGLE.fullmatch(path.name)
    return ModelFile(_KINDS[match["stem"]], match["variant"] or "", match["form"], path) if match else None


def list_model_files(folder: Path) -> Iterator[ModelFile]:
    """Yield the indexes and single files in a folder."""
    for path in store_of(folder).list_files(folder):
        if (file := parse_file_name(path)) is not None:
            yield file


def choose_files(folder: Path, kind: str) -> ModelFile | None:
    """Return the index or single file of a kind in a folder, or ``None`` if there is none.

    Like in transformers, safetensors is preferred to ``bin``. Raises ``FormatError`` if there are several variants and
    none without a name, or if there are both an index and a single file that it does not name.
    """
    files = [file for file in list_model_files(folder) if file.kind == kind]
    variants = sorted({file.variant for file in files})
    if len(variants) > 1 and "" not in variants:
        names = ", ".join(sorted(file.path.name for file in files))
        raise FormatError(f"{folder} holds several variants of a {kind}: {names}; open one of these files instead")
    candidates = sorted(
        (file for file in files if file.variant == variants[0]),
        key=lambda file: (file.form != "safetensors", not file.is_index),
    )
    if len(candidates) > 1 and candidates[0].form == candidates[1].form:
        index, single = candidates[0].path, candidates[1].path
        if single.name not in files_named_by(folder, [index.name]):
            raise two_saves_error(index, single)
    return candidates[0] if candidates else None


def folders_of(folder: Path) -> list[Path]:
    """Return the folders of the model and optimizer: the folder itself, or the subfolders of ColossalAI's scripts.

    Subfolders are recognized by an index of files of ``torch.save``, which no other system has in folders with these
    names.
    """
    subfolders = [folder / name for name in _FOLDERS if store_of(folder).is_directory(folder / name)]
    is_colossalai = any(
        file.is_index and file.form == "bin" for subfolder in subfolders for file in list_model_files(subfolder)
    )
    return subfolders if is_colossalai and not any(list_model_files(folder)) else [folder]


def list_components(folder: Path) -> list[ModelFile]:
    """Return the files of the model and of the optimizer in a folder, one of each."""
    components: dict[str, ModelFile] = {}
    for kind in (MODEL, OPTIMIZER):
        for subfolder in folders_of(folder):
            if (file := choose_files(subfolder, kind)) is not None:
                components.setdefault(kind, file)
    return list(components.values())
