"""The model's arguments in the files of NeMo 2 and Megatron-Bridge, which name Megatron's configuration classes.

The files are YAML. Nothing that they name is imported: every scalar is read as text, and tags have no meaning. Source:
``nemo/lightning/io`` of NeMo 2, ``megatron/bridge/training/utils`` of Megatron-Bridge, and ``TransformerConfig`` of
megatron-core.

The readers of iterations ask it on each rank that opens a checkpoint without arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rankless.errors import FormatError, RanklessError
from rankless.formats.torch_file import read_tree
from rankless.megatron.reader.model_args import READ_ADVICE, ModelArgs
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.store import store_of

#: The file of an iteration of Megatron-Bridge, and the one next to the weights of NeMo 2, with the keys to the model.
_RUN_CONFIG, _CONTEXT = "run_config.yaml", "context/model.yaml"
_MODEL_KEYS = {"run_config.yaml": "model", "model.yaml": "config"}

#: The folder of the weights of NeMo 2.
NEMO_WEIGHTS = "weights"

#: The most bytes of a file. Files of large models have 50 kB.
_LARGEST = 2**20

#: Megatron's names of arguments that have other names in a configuration.
_RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}

#: The activations of the families, by the ends of their names, and the argument for any other one.
_SILU, _GELU, ACTIVATION = "silu", "gelu", "activation_func"

#: The file of an iteration of Megatron-Bridge with counters of the training.
TRAIN_STATE = "train_state.pt"


def find_config(iteration: Path) -> Path | None:
    """Return the file with the model's configuration; ``None`` if there is none."""
    nemo = iteration.parent / _CONTEXT
    if iteration.name == NEMO_WEIGHTS and store_of(nemo).file_exists(nemo):
        return nemo
    bridge = iteration / _RUN_CONFIG
    return bridge if store_of(bridge).file_exists(bridge) else None


def choose_args(saved: Any, iteration: Path) -> ModelArgs:
    """Return the arguments that a checkpoint has, or else the arguments in its configuration.

    A configuration that cannot be read is an error when the arguments are needed.
    """
    args = ModelArgs.from_saved(saved, str(iteration))
    config = None if args.values else find_config(iteration)
    if config is None:
        return args
    try:
        return _read_model_args(config)
    except RanklessError as error:
        return ModelArgs({}, str(iteration), problem=str(error))


def _read_model_args(file: Path) -> ModelArgs:
    """Return the arguments in a configuration, by their names in Megatron-LM. Raises ``FormatError``."""
    store_of(file).check_regular(file, within=(file.parent,))
    tree = _parse_yaml(store_of(file).read_small(file, _LARGEST), file)
    model = tree.get(_MODEL_KEYS[file.name]) if isinstance(tree, dict) else None
    if not isinstance(model, dict):
        raise FormatError(f"{file} has no configuration of a model: {READ_ADVICE}")
    return ModelArgs(_convert_names({key: _to_value(value) for key, value in model.items()}), str(file))


def _parse_yaml(raw: bytes, file: Path) -> Any:
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise FormatError(
            f"{file} has the configuration of the model, and reading it needs PyYAML: pip install pyyaml, or "
            f"{READ_ADVICE}"
        ) from None
    try:
        return yaml.load(raw, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"{file} is not valid YAML: {str(error)[:200]}") from None


def _to_value(value: Any) -> Any:
    """Return the value of a scalar; the name of the object that a mapping points to; ``None`` for anything else."""
    if isinstance(value, dict):
        target = value.get("_target_")
        return target if isinstance(target, str) else None
    if not isinstance(value, str):
        return None
    known = {"null": None, "~": None, "": None, "true": True, "false": False}
    if value.lower() in known:
        return known[value.lower()]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _convert_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Megatron-LM that a ``TransformerConfig`` and a model's settings stand for."""
    args = {_RENAMED.get(key, key): value for key, value in config.items() if isinstance(key, str)}
    groups, heads = args.get("num_query_groups"), args.get("num_attention_heads")
    args["group_query_attention"] = groups is not None and groups != heads
    args["untie_embeddings_and_output_weights"] = args.get("share_embeddings_and_output_weights") is False
    activation = str(args.pop("activation_func", None) or "gelu").rpartition(".")[2]
    is_gated = bool(args.get("gated_linear_unit"))
    args["swiglu"] = is_gated and activation == _SILU
    if not args["swiglu"] and (is_gated or activation != _GELU):
        args[ACTIVATION] = f"{'gated ' if is_gated else ''}{activation}"
    return args


def read_train_state(iteration: Path, budget: ReadBudget) -> tuple[dict[str, Any], list[Path]]:
    """Return the counters that Megatron-Bridge keeps next to an iteration, and their file; none if there are none."""
    file = iteration / TRAIN_STATE
    if not store_of(file).file_exists(file):
        return {}, []
    store_of(file).check_regular(file, within=(iteration,))
    return {"train_state": read_tree(file, budget).root}, [file]
