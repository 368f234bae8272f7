"""Reader for DeepSpeed's checkpoints: whole tensors by parameter name, however they were divided among ranks.

``formats/registry.py`` names it: each rank of a load or conversion opens one. Readers of Accelerate's folders have one
for a part, and a conversion reads its output back with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankless.deepspeed.reader.file_access import FileAccess
from rankless.deepspeed.reader.tag_contents import ReadOptions, read_contents
from rankless.deepspeed.reader.tag_folders import find_tag
from rankless.errors import CorruptCheckpointError, FormatError, InvalidArgumentError, RanklessError, ReadBudgetError
from rankless.formats.recorded_steps import describe_mixed_steps
from rankless.formats.tree.tree_contents import from_components
from rankless.formats.tree.tree_reader import TreeReader
from rankless.storage.store import store_of

#: The attribute of Lightning's strategy that has the user's module.
_LIGHTNING_PREFIX = "_forward_module."

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
            components = _strip_prefixes(read.components)
            contents = from_components(components, {"user_content": read.user_content}, access.budget, str(folder))
        except ReadBudgetError as error:
            raise error if str(folder) in str(error) else ReadBudgetError(f"{folder}: {error}") from error
        except RanklessError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{folder} has files that DeepSpeed does not write: {error}") from error
        self._evidence = read.evidence
        #: A property that a read of all files does not prove.
        self.unproven = () if read.is_proven else (_UNPROVEN,)
        steps, skipped = read.user_content.get("global_steps"), read.user_content.get("skipped_steps")
        self._engine_steps = {"the state of DeepSpeed's engine": steps} if type(steps) is int else {}
        self._has_skipped_steps = bool(skipped)
        files = [*access.files, *read.other_files]
        super().__init__(folder, "deepspeed", files, access.fingerprint, contents)

    def check_files(self) -> None:
        """Check that the master weights, rounded, are the model's weights, and that ranks agree on the steps."""
        self._evidence.require_consistent(str(self.path))

    def describe_doubts(self) -> Sequence[str]:
        """Return a doubt if the optimizer has another step than the engine: its state is in the model's files."""
        return self.compare_steps(self._engine_steps)

    def compare_steps(self, recorded: Mapping[str, int]) -> Sequence[str]:
        """Return whether the optimizer is of another step than files that record one, by the names of these.

        It counts no step that was skipped for the loss scale. In bf16 without ZeRO it has counted one at its creation.
        """
        return describe_mixed_steps(self, OPTIMIZER, recorded, may_skip=self._has_skipped_steps, may_lead=1)


def _check_keys(keys: Mapping[str, str]) -> None:
    for key, value in keys.items():
        if key not in _CHOICES:
            raise InvalidArgumentError(f"keys: DeepSpeed checkpoints have the keys {', '.join(_CHOICES)}; got {key!r}")
        if value not in _CHOICES[key]:
            raise InvalidArgumentError(f"keys: {key} must be one of {', '.join(_CHOICES[key])}; got {value!r}")


def _strip_prefixes(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return the components with names without the prefix, if all tensors of the model have it."""
    model = components["model"]
    if not model or not all(name.startswith(_LIGHTNING_PREFIX) for name in model):
        return dict(components)
    stripped = {**components, "model": _strip_keys(model)}
    optimizer = components.get("optimizer")
    if isinstance(optimizer, dict):
        stripped["optimizer"] = {
            "state": _strip_keys(optimizer["state"]),
            "param_groups": [
                {**group, "params": [_strip_name(name) for name in group["params"]]}
                for group in optimizer["param_groups"]
            ],
        }
    return stripped


def _strip_keys(table: Mapping[Any, Any]) -> dict[Any, Any]:
    return {_strip_name(key): value for key, value in table.items()}


def _strip_name(name: Any) -> Any:
    return name.removeprefix(_LIGHTNING_PREFIX) if isinstance(name, str) else name
