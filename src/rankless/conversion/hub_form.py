"""The form of a model on the Hugging Face Hub: the names that ``save_pretrained`` gives its tensors.

:mod:`rankless.conversion.pipeline` calls :func:`adapt_source` on each rank that opens the source of a conversion to
``hf``. ``save_pretrained`` must give the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rankless.conversion.target import ConversionSource
from rankless.conversion.tensor_filter import Key, SelectedTensors
from rankless.engine.plan.split_tensors import Splits
from rankless.errors import CorruptCheckpointError, InvalidArgumentError
from rankless.formats.hub_layout_file import join_tensors, read_layout
from rankless.formats.reader import Reader
from rankless.formats.remapped_reader import NamedRange, RemappedReader, TensorMapping, identity_mapping
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.torchao_form import flat_names, header_notes, select_described

_MODEL = "model"


def adapt_source(source: ConversionSource) -> ConversionSource:
    """Return the source with the names of the Hub, for a conversion to a Hugging Face folder.

    Tensors that the user has renamed keep their new names. Parts of a tensor keep the names of the checkpoint if other
    parts of it are not selected.
    """
    described = select_described(source.carried.shared.get(_MODEL, {}))
    flat = flat_names(described)
    selected = source.selected
    names = [*selected.infos_of_group(_MODEL), *selected.tied.get(_MODEL, {})]
    notes = header_notes(described, [name for name in names if name not in flat])
    return _join_tensors(replace(source, selected=_rename_tensors(selected, flat), notes=notes), flat)


def _rename_tensors(selected: SelectedTensors, names: Mapping[str, str]) -> SelectedTensors:
    """Return the selected tensors, with new names for the tensors of the model that are in ``names``."""

    def rename(key: Key) -> Key:
        return (key[0], names.get(key[1], key[1])) if key[0] == _MODEL else key

    return SelectedTensors(
        {rename(key): stored for key, stored in selected.sources.items()},
        {rename(key): info for key, info in selected.infos.items()},
        {**selected.tied, _MODEL: _rename_ties(selected.tied.get(_MODEL, {}), names)},
    )


def _rename_ties(tied: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {names.get(alias, alias): names.get(name, name) for alias, name in tied.items()}


def _join_tensors(source: ConversionSource, flat: Mapping[str, str]) -> ConversionSource:
    """Return the source with the tensors that ``save_pretrained`` writes.

    ``flat`` are the names of inner tensors in torchao's form, which the layout has, by those in the checkpoint.
    """
    layout, reader, selected = read_layout(source.reader), source.reader, source.selected
    if not layout:
        return source
    stored = {flat.get(name, name): name for name in reader.groups[_MODEL]}
    unknown = next((name for name in (*layout.splits, *layout.left_out) if name not in stored), None)
    if unknown is not None:
        raise CorruptCheckpointError(f"{reader.path}: the layout for the Hub has {unknown!r}, which is no tensor of it")
    unchanged = {name for name in stored if selected.sources.get((_MODEL, name)) == (_MODEL, stored[name])}
    splits = _select_whole(layout.splits, unchanged)
    joined = join_tensors(splits, {name: reader.groups[_MODEL][stored[name]] for name in splits})
    replaced = {*splits, *(name for name in layout.left_out if name in unchanged)}
    kept = {key: stored_key for key, stored_key in selected.sources.items() if not _is_in(key, replaced)}
    _check_free(joined, kept)
    return replace(
        source,
        reader=_add_tensors(reader, joined, stored),
        selected=_replace_tensors(selected, kept, joined, splits),
    )


def _check_free(joined: Iterable[str], kept: Mapping[Key, Key]) -> None:
    """Raise ``InvalidArgumentError`` if a tensor that keeps its name, or its source, has the name of a joined one."""
    taken = next((name for name in joined if (_MODEL, name) in {*kept, *kept.values()}), None)
    if taken is not None:
        raise InvalidArgumentError(f"{taken!r} is also the name of another tensor on the Hub: change rename")


def _add_tensors(reader: Reader, joined: Mapping[str, TensorMapping], stored: Mapping[str, str]) -> Reader:
    """Return a reader that has the joined tensors, too. ``stored`` are the names of their parts in the checkpoint."""
    table = {group: identity_mapping(infos) for group, infos in reader.groups.items()}
    for name, mapping in joined.items():
        ranges = [NamedRange(stored[part.name], part.start, part.stop) for part in mapping.ranges]
        table[_MODEL][name] = TensorMapping(mapping.info, ranges)
    return RemappedReader(reader, table, reader.tied, lambda shared: shared)


def _replace_tensors(
    selected: SelectedTensors,
    kept: Mapping[Key, Key],
    joined: Mapping[str, TensorMapping],
    splits: Mapping[str, Splits],
) -> SelectedTensors:
    """Return the selected tensors with the joined ones, which have the dtypes that their parts are cast to."""
    dtypes = {split.name: selected.infos[_MODEL, name].dtype for name in splits for split in splits[name]}
    infos = {(_MODEL, name): TensorInfo(dtypes[name], mapping.info.shape) for name, mapping in joined.items()}
    whole = {name: of_tensor[0].name for name, of_tensor in splits.items() if len({new.name for new in of_tensor}) == 1}
    return SelectedTensors(
        {**kept, **{key: key for key in infos}},
        {**{key: selected.infos[key] for key in kept}, **infos},
        {**selected.tied, _MODEL: _rename_ties(selected.tied.get(_MODEL, {}), whole)},
    )


def _select_whole(splits: Mapping[str, Splits], names: set[str]) -> dict[str, Splits]:
    """Return the splits of tensors if their stored tensors consist of tensors in ``names`` alone."""
    partial = {split.name for name, of_tensor in splits.items() if name not in names for split in of_tensor}
    kept = {name: of_tensor for name, of_tensor in splits.items() if name in names}
    if not any(split.name in partial for of_tensor in kept.values() for split in of_tensor):
        return kept
    return _select_whole(kept, {name for name in kept if not any(split.name in partial for split in kept[name])})


def _is_in(key: Key, names: set[str]) -> bool:
    return key[0] == _MODEL and key[1] in names
