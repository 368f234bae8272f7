"""What a folder holds of models and optimizers, told by the names of indexes and single files.

Source: transformers' ``utils/hub.py`` and ColossalAI 0.5.0's ``checkpoint_io/utils.py``. What ColossalAI calls a prefix
is transformers' variant: it stands before ``.json``, and before the ending of a single file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import FormatError
from holdfast.storage import posix

MODEL, OPTIMIZER = "model", "optimizer"

#: Folders of both in one, as ColossalAI's training scripts call them; and files that lie beside these.
MODELING = "modeling"
_FOLDERS = (MODELING, "model", "optimizer")
SCHEDULER, CONTENT = "lr_scheduler", "user_content.pt"

_INDEX = re.compile(
    r"(?P<stem>pytorch_model|model|pytorch_optim|optimizer)\.(?P<form>bin|safetensors)\.index(\.(?P<variant>.+))?\.json"
)
_SINGLE = re.compile(
    r"(?P<stem>pytorch_model(?=.*\.bin)|model(?=.*\.safetensors))"
    r"(\.(?P<variant>(?!safetensors|bin)[^-]+))?\.(?P<form>bin|safetensors)"
)

_KINDS = {"pytorch_model": MODEL, "model": MODEL, "pytorch_optim": OPTIMIZER, "optimizer": OPTIMIZER}


class ModelFile(NamedTuple):
    """An index, or a single file, of one part in one variant (``""`` is none) and one form."""

    kind: str
    variant: str
    form: str
    path: Path

    @property
    def is_index(self) -> bool:
        """Whether it names the files, or is the file."""
        return self.path.suffix == ".json"


def list_named_files(path: Path) -> ModelFile | None:
    """What a file is, by its name."""
    match = _INDEX.fullmatch(path.name) or _SINGLE.fullmatch(path.name)
    return ModelFile(_KINDS[match["stem"]], match["variant"] or "", match["form"], path) if match else None


def list_model_files(folder: Path) -> Iterator[ModelFile]:
    """All that a folder holds."""
    for file in posix.list_files(folder):
        if (found := list_named_files(file)) is not None:
            yield found


def choose_files(folder: Path, kind: str) -> ModelFile | None:
    """What a folder holds of one kind. Raises ``FormatError`` where it has several variants and none without a name.

    Of both forms safetensors is taken, and an index before a single file, as transformers does.
    """
    every = [found for found in list_model_files(folder) if found.kind == kind]
    variants = sorted({found.variant for found in every})
    if len(variants) > 1 and "" not in variants:
        names = ", ".join(sorted(found.path.name for found in every))
        raise FormatError(f"{folder} holds several variants of a {kind}: {names}; name one of these files")
    same = [found for found in every if found.variant == variants[0]]
    return min(same, key=lambda found: (found.form != "safetensors", not found.is_index), default=None)


def folders_of(folder: Path) -> list[Path]:
    """Where parts are: the folder itself, or the folders in it that ColossalAI's training scripts make.

    These are told by an index of files of ``torch.save``, which nobody else has in folders of such names.
    """
    apart = [folder / name for name in _FOLDERS if posix.is_directory(folder / name)]
    told = any(found.is_index and found.form == "bin" for place in apart for found in list_model_files(place))
    return apart if told and not any(list_model_files(folder)) else [folder]


def list_parts(folder: Path) -> list[ModelFile]:
    """The model and the optimizer that a folder holds, each once."""
    first: dict[str, ModelFile] = {}
    for kind in (MODEL, OPTIMIZER):
        for place in folders_of(folder):
            if (found := choose_files(place, kind)) is not None:
                first.setdefault(kind, found)
    return list(first.values())
