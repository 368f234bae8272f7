"""The source of a conversion to Megatron, and the tensors that the checkpoint gets from it.

:mod:`rankless.conversion.pipeline` calls :func:`adapt_source` on each rank that opens the source of a conversion to
``megatron``. All ranks must get the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rankless.conversion.fake_tensors import FakeTensors
from rankless.conversion.hub_files import read_config as read_config_file
from rankless.conversion.native_target import companion_files
from rankless.conversion.target import ConversionSource
from rankless.conversion.tensor_filter import Key
from rankless.errors import FormatError, InvalidArgumentError
from rankless.megatron.reader.hf_families import Family, choose_family
from rankless.megatron.reader.model_args import ModelArgs
from rankless.megatron.writer.args_from_config import ADVICE, missing_config, read_config
from rankless.megatron.writer.hf_tensors import plan_from_hf, transposed_names
from rankless.megatron.writer.megatron_options import MegatronOptions
from rankless.megatron.writer.parts import MASTER, MODEL, OPTIMIZER, LayerTensor, StoredEntry
from rankless.megatron.writer.sorted_optimizer import STATES, OptimizerStates, build_groups, collect_states
from rankless.megatron.writer.source_values import decode_values, find_args
from rankless.megatron.writer.stacking import (
    StackedModel,
    is_megatron_name,
    pad_rows,
    plan_from_megatron,
    stack_layers,
)
from rankless.megatron.writer.transposed_reader import TransposedReader
from rankless.ondisk.data_files import CONFIG, TensorInfo
from rankless.state.tensor_views import DTYPES, NAMES

_MASTER_DTYPE = "F32"


@dataclass(frozen=True)
class MegatronPlan:
    """The contents of the checkpoint: its tensors by key, the stacked model, the optimizer's groups and arguments.

    ``iteration`` is the training step of the source, if it has one.
    """

    entries: Mapping[str, StoredEntry]
    model: StackedModel
    groups: Sequence[Mapping[str, Any]] | None
    args: ModelArgs
    options: MegatronOptions
    iteration: int | None


@dataclass(frozen=True)
class MegatronSource(ConversionSource):
    """A source with tensors as Megatron needs them: cast, transposed, and weights also as master weights."""

    plan: MegatronPlan = field(kw_only=True)


def adapt_source(source: ConversionSource) -> MegatronSource:
    """Return the source with its plan. Raises ``FormatError`` naming a tensor that has no place in Megatron."""
    options = MegatronOptions.from_given(source.options)
    _check_components(source)
    values = decode_values(source, FakeTensors(source.tensor_infos))
    adapted, layers, args = _plan_layers(source, values, options)
    states = collect_states(adapted, values) if "optimizer" in values else None
    adapted = _cast_tensors(adapted, states, args)
    model = stack_layers(layers, args)
    entries = _plan_entries(adapted, model, states)
    groups = None if states is None else build_groups(values, layers, states, args, experts=options.expert_parallel)
    settings = {name: getattr(adapted, name) for name in ConversionSource.__dataclass_fields__}
    plan = MegatronPlan(entries, model, groups, args, options, _find_iteration(source))
    return MegatronSource(**settings, plan=plan)


def _find_iteration(source: ConversionSource) -> int | None:
    step = source.step
    return None if step is None else int(step)


def _check_components(source: ConversionSource) -> None:
    groups = source.selected.group_names()
    others = [group for group in {*groups, *source.carried.shared} if "/" in group]
    if MODEL not in groups or others:
        raise InvalidArgumentError(
            f"Megatron has one model and one optimizer, but the source has {', '.join(sorted(others)) or 'no model'}: "
            'select one with keys={"model": …}, on the command line --key model=…, or convert with model_only'
        )


def _plan_layers(
    source: ConversionSource, values: Mapping[str, Any], options: MegatronOptions
) -> tuple[ConversionSource, dict[str, LayerTensor], ModelArgs]:
    """Return the source in Megatron's orientation, Megatron's tensors of each layer, and the arguments."""
    label, shapes = str(source.reader.path), _model_shapes(source)
    args = find_args(values, label)
    if any(map(is_megatron_name, shapes)):
        return source, plan_from_megatron(shapes, options.vocab_divisible_by, label), args
    family, args = _find_family(source, options, args)
    transposed = transposed_names(shapes, family)
    source = _transpose_tensors(source, transposed)
    shapes = _model_shapes(source)
    tied = source.selected.tied.get(MODEL, {})
    if args.is_set("untie_embeddings_and_output_weights"):
        shapes |= {alias: shapes[name] for alias, name in tied.items()}
    padded = pad_rows(args.require_size("vocab_size"), options.vocab_divisible_by)
    return source, plan_from_hf(shapes, family, args, padded), args


def _model_shapes(source: ConversionSource) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in source.selected.infos_of_group(MODEL).items()}


def _find_family(source: ConversionSource, options: MegatronOptions, args: ModelArgs) -> tuple[Family, ModelArgs]:
    if options.config is not None:
        return read_config(read_config_file(options.config), options.config)
    data = dict(companion_files(source.reader)).get(CONFIG)
    if data is not None:
        return read_config(data, f"{source.reader.path}: {CONFIG}")
    if not args.values:
        raise missing_config(str(source.reader.path))
    args = replace(args, advice=ADVICE)
    return choose_family(args), args


def _transpose_tensors(source: ConversionSource, names: Sequence[str]) -> ConversionSource:
    """Return a source with these parameters and their states of two dimensions the other way round."""
    if not names:
        return source
    wanted = set(names)
    keys = [
        key
        for key, info in source.selected.infos.items()
        if len(info.shape) > 1 and (key[1] if key[0] == MODEL else key[1].rpartition("/")[0]) in wanted
    ]
    reader = TransposedReader(source.reader, {source.selected.sources[key] for key in keys})
    infos = dict(source.selected.infos)
    infos |= {key: TensorInfo(infos[key].dtype, infos[key].shape[::-1]) for key in keys}
    return replace(source, reader=reader, selected=replace(source.selected, infos=infos))


def _cast_tensors(source: ConversionSource, states: OptimizerStates | None, args: ModelArgs) -> ConversionSource:
    """Return a source with master weights and states of 32 bits, and weights in the dtype that the model computes in.

    Readers give the master weights as the model, and Megatron's arguments give the dtype of the weights.
    """
    if states is None:
        return source
    sources, infos = dict(source.selected.sources), dict(source.selected.infos)
    dtype = args.get("params_dtype")
    own = NAMES.get(dtype) if isinstance(dtype, torch.dtype) and source.dtype is None else None
    for name, by_state in states.keys.items():
        weight = infos[MODEL, name]
        sources[MASTER, name] = sources[MODEL, name]
        infos[MASTER, name] = TensorInfo(_MASTER_DTYPE, weight.shape)
        infos |= {key: TensorInfo(_MASTER_DTYPE, weight.shape) for key in by_state.values()}
        if own is not None:
            infos[MODEL, name] = TensorInfo(own, weight.shape)
    return replace(source, selected=replace(source.selected, sources=sources, infos=infos))


def _plan_entries(
    source: ConversionSource, model: StackedModel, states: OptimizerStates | None
) -> dict[str, StoredEntry]:
    tied = source.selected.tied.get(MODEL, {})
    entries = {}
    for key, tensor in model.tensors.items():
        names = {name: tied.get(name, name) for name in tensor.names}
        entries[key] = _make_entry(source, key, tensor, {name: (MODEL, own) for name, own in names.items()})
    if states is None:
        return entries
    for key, tensor in model.tensors.items():
        if not states.check_entry(key, tensor):
            continue
        masters = {name: (MASTER, name) for name in tensor.names}
        entries[f"{OPTIMIZER}.state.param.{key}"] = _make_entry(source, key, tensor, masters)
        for state in STATES:
            keys = {name: states.keys[name][state] for name in tensor.names}
            entries[f"{OPTIMIZER}.state.{state}.{key}"] = _make_entry(source, key, tensor, keys)
    return entries


def _make_entry(source: ConversionSource, key: str, tensor: LayerTensor, sources: dict[str, Key]) -> StoredEntry:
    """Return the entry of a tensor. Raises ``FormatError`` naming a part with another dtype."""
    infos = source.selected.infos
    dtypes = {name: infos[own].dtype for name, own in sources.items()}
    first = tensor.names[0]
    other = next((name for name in dtypes if dtypes[name] != dtypes[first]), None)
    if other is not None or dtypes[first] not in DTYPES:
        raise FormatError(
            f"{source.reader.path}: {first!r} has the dtype {dtypes[first]} and {other or first!r} "
            f"{dtypes[other or first]}, and Megatron has them in one tensor, {key}: cast the model with dtype (--dtype)"
        )
    return StoredEntry(TensorInfo(dtypes[first], tensor.shape), tensor.parts, sources)
