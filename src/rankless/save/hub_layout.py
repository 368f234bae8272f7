"""The form that ``save_pretrained`` gives to a model, for the checkpoint, which has the tensors as in memory.

:mod:`rankless.save.training_content` calls it in the commit. Exports read the file: its form is part of the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankless.engine.plan.save_plan import SavePlan
from rankless.formats.hub_layout_file import HubLayout, encode_layout, is_stored_as
from rankless.ondisk.data_files import HUB_LAYOUT, TensorInfo
from rankless.ondisk.torchao_form import flat_names, select_described
from rankless.state.model.fused_layout import stored_layout


def hub_layout_files(models: Mapping[str, object], plan: SavePlan, values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the file with the layout of each model of transformers, by its path in the checkpoint.

    ``models`` are the models by slot, and ``values`` the values that all ranks have agreed on. Called on rank 0, once
    for each plan of a save.
    """
    files = {}
    for slot, model in models.items():
        entries = [entry for file in plan.groups.get(slot, ()) for entry in file.entries.items()]
        infos = {name: TensorInfo(entry.dtype, entry.shape) for name, entry in entries}
        layout = find_hub_layout(model, infos, values.get(slot, {}))
        if layout:
            files[f"{slot}/{HUB_LAYOUT}"] = encode_layout(layout)
    return files


def find_hub_layout(model: object, infos: Mapping[str, TensorInfo], values: Mapping[str, Any]) -> HubLayout:
    """Return how ``save_pretrained`` would store a model, given its tensors and values in the checkpoint.

    It is empty if rankless cannot follow the changes by transformers.
    """
    names = flat_names(select_described(values))
    infos = {names.get(name, name): info for name, info in infos.items()}
    try:
        layout = stored_layout(model, infos)
    except Exception:  # noqa: BLE001 - code of transformers or of the model; exports have the checkpoint's names then
        return HubLayout()
    splits = {
        name: of_tensor
        for name, of_tensor in sorted(layout.splits.items())
        if not is_stored_as(name, infos[name].shape, of_tensor)
    }
    return HubLayout(splits, tuple(sorted(infos.keys() - layout.splits.keys())))
