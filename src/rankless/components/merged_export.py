"""Export of a model with its PEFT adapter merged into the weights: a Hugging Face folder, written by one process.

``rankless convert --merge`` calls it in one process, :func:`rankless.merge_adapters` likewise.
"""

from __future__ import annotations

import copy
import importlib.util
from collections import Counter
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from rankless.components.component_calls import load_component, save_model
from rankless.components.component_view import ComponentView
from rankless.components.stored_component import MODEL
from rankless.engine.comm.process_group_argument import SELF
from rankless.errors import InvalidArgumentError
from rankless.formats.adapter_configs import read_adapter_configs
from rankless.formats.native import NativeReader
from rankless.formats.reader import Reader
from rankless.ondisk.data_files import SHARD_SIZE, is_adapter_group
from rankless.run.lookup import open_latest
from rankless.run.unpublished_output import hold_output
from rankless.state.model.peft_adapters import BASE
from rankless.state.tensor_views import DTYPES
from rankless.state.training import TrainingObjects
from rankless.storage import posix
from rankless.storage.location import parse_location

#: How many seconds ranks would wait for each other; there is only one.
_TIMEOUT = 600.0


def merge_adapters(
    path: str | PathLike[str], output: str | PathLike[str], *, max_shard_size: int | str = SHARD_SIZE
) -> Path:
    """Merge the PEFT adapter of a checkpoint into its model, and write a folder that ``from_pretrained`` opens.

    PEFT and transformers must be installed: the model is built and loaded, and PEFT's ``merge_and_unload`` computes
    the weights. One process does all of it, on the CPU, and its memory holds the whole model.

    Args:
        path: a checkpoint of a PEFT model around a model of transformers, with the base model and one adapter; or a
            run's folder for its latest checkpoint.
        output: the output path; must not exist.
        max_shard_size: the maximum bytes of tensors in one file.

    Returns:
        The path of the output.

    Raises:
        InvalidArgumentError: the checkpoint has no base model, no adapter or several of them; or the adapter is of a
            kind that cannot be merged; or a package is missing; or several processes call it together.
        TagExistsError: ``output`` exists.
        CorruptCheckpointError: bytes of the checkpoint do not match their checksums.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise InvalidArgumentError("adapters are merged by one process: call it without a process group of several")
    final = parse_location(output)
    with hold_output(final):
        _check_packages()
        return _merge(open_latest(parse_location(path)), final, max_shard_size)


def _merge(checkpoint: Reader, final: Path, max_shard_size: int | str) -> Path:
    reader, group = _find_adapter(checkpoint)
    base, adapter = _build_model(reader, group)
    model = _load_model(base, adapter, reader, group)
    if adapter.peft_type.value != "LORA":
        # Some kinds compute tensors that they do not store from the weights that they find.
        model = _load_model(model.unload(), adapter, reader, group)
    _untie_adapted(model)
    try:
        merged = model.merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise InvalidArgumentError(f"PEFT cannot merge the adapter of {reader.path} into its model: {error}") from error
    save_model(merged, final, shard=True, max_shard_size=max_shard_size, process_group=SELF)
    return final


def _check_packages() -> None:
    for name in ("peft", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise InvalidArgumentError(f"merging adapters needs peft and transformers: install {name}")


def _find_adapter(reader: Reader) -> tuple[NativeReader, str]:
    """Return the checkpoint, and the group of its only adapter."""
    groups = [group for group in reader.groups if is_adapter_group(group)]
    if not isinstance(reader, NativeReader) or MODEL not in reader.groups or not groups:
        raise InvalidArgumentError(
            f"{reader.path} is not a rankless checkpoint of a model with a PEFT adapter, with its base model"
        )
    if len(groups) > 1:
        raise InvalidArgumentError(
            f"{reader.path} has the adapters {', '.join(sorted(groups))}: load it, and merge those that you want with "
            "PEFT"
        )
    if f"{groups[0]}/{BASE}/config.json" not in reader.manifest.files:
        raise InvalidArgumentError(f"the base model in {reader.path} is not one of transformers")
    if not any(name.startswith("base_model.") for name in reader.groups[MODEL]):
        raise InvalidArgumentError(
            f"the adapter in {reader.path} was put into its model by transformers, and PEFT cannot merge it: put "
            "adapters in with peft.get_peft_model()"
        )
    return reader, groups[0]


def _build_model(reader: NativeReader, group: str) -> tuple[Any, Any]:
    """Return the base model of a checkpoint, with values that are to be replaced, and the adapter's configuration."""
    with TemporaryDirectory() as folder:  # PEFT and transformers read files of a disk
        for name, data in read_adapter_configs(reader).items():
            posix.make_parents(Path(folder), name)
            posix.write_small(Path(folder) / name, data)
        try:
            return _build_base(Path(folder) / group / BASE, reader.path), _read_config(Path(folder) / group)
        except InvalidArgumentError:
            raise
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"the base model in {reader.path} cannot be built: {error!r}") from error


def _build_base(base_folder: Path, checkpoint: Path) -> Any:
    import transformers  # noqa: PLC0415 - an optional package

    config = transformers.AutoConfig.from_pretrained(base_folder)
    (architecture,) = config.architectures
    model_class = getattr(transformers, architecture, None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise InvalidArgumentError(f"transformers has no {architecture}, the base model in {checkpoint}")
    base = model_class(config)
    if posix.file_exists(base_folder / "generation_config.json"):
        base.generation_config = transformers.GenerationConfig.from_pretrained(base_folder)
    return base


def _read_config(folder: Path) -> Any:
    import peft  # noqa: PLC0415 - an optional package

    adapter = peft.PeftConfig.from_pretrained(str(folder))
    if adapter.is_prompt_learning:
        raise InvalidArgumentError(f"{adapter.peft_type.value} trains prompts, which cannot be merged into weights")
    return adapter


def _load_model(base: Any, adapter: Any, reader: Any, group: str) -> Any:
    """Put an adapter into a base model, and load the values of both."""
    import peft  # noqa: PLC0415 - an optional package

    config = copy.deepcopy(adapter)
    config.base_model_name_or_path = None  # else PEFT warns that the base model is in another folder now
    model = peft.get_peft_model(base, config, group.partition("/")[2] or "default")
    _set_dtypes(model, reader)
    load_component(TrainingObjects(model), reader.path, ComponentView(MODEL), (SELF, _TIMEOUT), strict=True)
    return model


def _untie_adapted(model: Any) -> None:
    """Give layers with an adapter weights of their own: to merge into a tied weight changes the other layer, too.

    Trained tokens are the same in both layers.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer  # noqa: PLC0415 - an optional package
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415

    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    layers = [module.get_base_layer() for module in adapted if not isinstance(module, TrainableTokensLayer)]
    tied = [
        (layer, name, parameter)
        for layer in layers
        for name, parameter in layer.named_parameters(recurse=False)
        if uses[id(parameter)] > 1
    ]
    for layer, name, parameter in tied:
        setattr(layer, name, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False))
    if tied:
        config = model.get_base_model().config
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False


def _set_dtypes(model: torch.nn.Module, reader: Any) -> None:
    """Give the parameters the dtypes that are stored, so that PEFT merges with the precision of the training."""
    stored, tied = reader.groups[MODEL], reader.tied.get(MODEL, {})
    for name, parameter in model.named_parameters():
        info = stored.get(tied.get(name, name))
        if info is not None:
            parameter.data = parameter.data.to(DTYPES[info.dtype])
