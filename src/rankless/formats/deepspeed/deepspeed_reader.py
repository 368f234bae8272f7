"""Reader for DeepSpeed's checkpoints: whole tensors by parameter name, however they were divided among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankless.errors import CorruptCheckpointError, FormatError, InvalidArgumentError, RanklessError, ReadBudgetError
from rankless.formats.deepspeed.contents import ReadOptions, read_contents
from rankless.formats.deepspeed.file_access import FileAccess
from rankless.formats.deepspeed.prefixes import strip_prefixes
from rankless.formats.deepspeed.tags import find_tag
from rankless.formats.tree.contents import from_components
from rankless.formats.tree.tree_reader import TreeReader
from rankless.storage.store import store_of

#: The keys that a reader of this format accepts, and their values; the first ones are the defaults.
WEIGHTS, OPTIMIZER = "weights", "optimizer"
_MASTER, _MODEL = "master", "model"
_READ, _SKIP = "read", "skip"
_CHOICES = {WEIGHTS: (_MASTER, _MODEL), OPTIMIZER: (_READ, _SKIP)}

_UNPROVEN = (
    "there is no second copy of the weights (ZeRO-3, universal checkpoints): the CRCs of the files and all sizes were "
    "checked, but nothing in them can prove that each parameter is at its place"
)


class DeepSpeedReader(TreeReader):
    """A reader of a folder with a file ``latest``, or of the folder of a tag.

    ``keys``: ``weights`` says which tensors the model gets: ``master`` (the default), the fp32 master weights of the
    parameters that are trained, or ``model``, the weights that the model computes with, which ZeRO-3 does not save.
    ``optimizer``: ``read`` (the default) or ``skip`` its states.
    """

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        _check_keys(keys)
        if not store_of(path).is_directory(path):
            raise FormatError(
                f"{path} has the part of one rank of a DeepSpeed checkpoint: open the folder {path.parent}"
            )
        options = ReadOptions(keys.get(WEIGHTS, _MASTER) == _MASTER, keys.get(OPTIMIZER, _READ) == _READ)
        folder, access = find_tag(path), FileAccess(path)
        try:
            read = read_contents(folder, access, options)
            components = strip_prefixes(read.components)
            contents = from_components(components, {"user_content": read.user_content}, access.budget, str(folder))
        except ReadBudgetError as error:
            raise error if str(folder) in str(error) else ReadBudgetError(f"{folder}: {error}") from error
        except RanklessError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{folder} has files that DeepSpeed does not write: {error}") from error
        self._evidence = read.evidence
        #: What reading all of it does not prove.
        self.unproven = () if read.is_proven else (_UNPROVEN,)
        files = [*access.files, *read.other_files]
        super().__init__(folder, "deepspeed", files, access.fingerprint, contents)

    def check_files(self) -> None:
        """Check that the master weights, rounded, are the model's weights, and that ranks agree on the steps."""
        self._evidence.require_consistent(str(self.path))


def _check_keys(keys: Mapping[str, str]) -> None:
    for key, value in keys.items():
        if key not in _CHOICES:
            raise InvalidArgumentError(f"keys: DeepSpeed checkpoints have the keys {', '.join(_CHOICES)}; got {key!r}")
        if value not in _CHOICES[key]:
            raise InvalidArgumentError(f"keys: {key} must be one of {', '.join(_CHOICES[key])}; got {value!r}")
