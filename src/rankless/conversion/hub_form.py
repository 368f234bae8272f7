"""The form of a model on the Hugging Face Hub: the names that ``save_pretrained`` gives its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rankless.conversion.target import ConversionSource
from rankless.conversion.tensor_filter import SelectedTensors
from rankless.ondisk.torchao_form import flat_names, header_notes, select_described

_MODEL = "model"


def adapt_source(source: ConversionSource) -> ConversionSource:
    """Return the source with the names of the Hub, for a conversion to a Hugging Face folder."""
    described = select_described(source.carried.shared.get(_MODEL, {}))
    selected = _rename_tensors(source.selected, flat_names(described))
    return replace(source, selected=selected, notes=header_notes(described, _plain_names(source, described)))


def _plain_names(source: ConversionSource, described: Mapping[str, str]) -> list[str]:
    names = [*source.selected.infos_of_group(_MODEL), *source.selected.tied.get(_MODEL, {})]
    return [name for name in names if name not in flat_names(described)]


def _rename_tensors(selected: SelectedTensors, names: Mapping[str, str]) -> SelectedTensors:
    """Return the selected tensors with other names of those of the model that are in ``names``."""
    keys = {key: (key[0], names.get(key[1], key[1]) if key[0] == _MODEL else key[1]) for key in selected.infos}
    tied = {names.get(alias, alias): names.get(name, name) for alias, name in selected.tied.get(_MODEL, {}).items()}
    return SelectedTensors(
        {keys[key]: stored for key, stored in selected.sources.items()},
        {keys[key]: info for key, info in selected.infos.items()},
        {**selected.tied, _MODEL: tied},
    )
