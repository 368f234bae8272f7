"""The round trips of a family, in one process and on ranks that shard with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rankless
from campaigns.families.catalogue import Family
from campaigns.families.models import Recipe, find_differences, is_equal, shard
from campaigns.families.reference import Reference, open_pretrained
from campaigns.families.tiny_configs import make_tiny_config

#: The seeds of the model that is saved, and of the one that is loaded into.
_SAVED, _FRESH = 1, 2

PLAIN, FSDP2 = "plain", "fsdp2"


def make_recipe(family: Family) -> Recipe:
    """Return how to build a tiny model of a family. Raises transformers' error if it cannot be built."""
    recipe = Recipe(family.model_class, None)
    return Recipe(family.model_class, make_tiny_config(recipe.find_class(), family.changes))


def make_reference(recipe: Recipe, folder: Path) -> Reference:
    """Return transformers' own round trip. Raises its error if it fails."""
    saved = recipe.build(_SAVED)
    saved.save_pretrained(folder, max_shard_size=_shard_size(saved))
    return Reference(recipe, folder, saved, open_pretrained(recipe, folder))


def _shard_size(model: nn.Module) -> int:
    """Return a size of files of which a model has several."""
    nbytes: int = sum(tensor.nbytes for tensor in model.state_dict().values())
    return max(2**16, nbytes // 2)


def check_plain(reference: Reference, folder: Path) -> list[str]:
    """Return what is wrong with the round trips in one process."""
    wrong = run_round_trips(reference.recipe, reference.folder, folder, PLAIN)
    return [*wrong, *_check_written(reference, folder)]


def check_fsdp2(ranks: Any, size: int, reference: Reference, folder: Path) -> list[str]:
    """Return what is wrong with the round trips on ranks of a pool."""
    by_rank = ranks(size, run_round_trips, reference.recipe, reference.folder, folder, FSDP2)
    wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(by_rank) for text in texts]
    return [*wrong, *_check_written(reference, folder)]


def _check_written(reference: Reference, folder: Path) -> Iterator[str]:
    if (folder / "model").exists():
        for text in reference.compare_folder(folder / "model"):
            yield f"save_model: {text}"
    if (folder / "models").exists():
        size = _shard_size(reference.saved)
        rankless.convert(folder / "models", folder / "converted", to="hf", max_shard_size=size)
        for text in reference.compare_folder(folder / "converted"):
            yield f"convert: {text}"


def run_round_trips(recipe: Recipe, pretrained: Path, folder: Path, layout: str) -> list[str]:
    """Save a model and a checkpoint into a folder, and load that checkpoint and a folder of ``save_pretrained``.

    Returns what is wrong with the loaded objects. All ranks call it.
    """
    model = _shard_for(layout, recipe.build(_SAVED))
    wrong = []
    for name, round_trip in _ROUND_TRIPS.items():
        try:
            wrong += [f"{name}: {text}" for text in round_trip(recipe, model, pretrained, folder, layout)]
        except rankless.RanklessError as error:
            wrong.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return wrong


def _shard_for(layout: str, model: nn.Module) -> nn.Module:
    return shard(model, init_device_mesh("cpu", (dist.get_world_size(),))) if layout == FSDP2 else model


def _load_pretrained(recipe: Recipe, model: nn.Module, pretrained: Path, _: Path, layout: str) -> Iterator[str]:
    loaded = _shard_for(layout, recipe.build(_FRESH))
    rankless.load_model(loaded, pretrained)
    yield from _describe(find_differences(model, loaded))


def _load_onto_meta(recipe: Recipe, model: nn.Module, pretrained: Path, _: Path, layout: str) -> Iterator[str]:
    loaded = _shard_for(layout, recipe.build_on_meta())
    rankless.load_model(loaded, pretrained)
    yield from _describe(find_differences(model, loaded))


def _save(_: Recipe, model: nn.Module, __: Path, folder: Path, ___: str) -> Iterator[str]:
    rankless.save_model(model, folder / "model", shard=True, max_shard_size=_shard_size(model)).wait()
    rankless.save_checkpoint(folder / "models", "saved", model)
    yield from ()


def _resume(recipe: Recipe, model: nn.Module, _: Path, folder: Path, layout: str) -> Iterator[str]:
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        if parameter.is_floating_point() and parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.01 * (1 + number % 7))
    optimizer.step()
    rankless.save_checkpoint(folder / "run", "step_1", model, optimizer)
    loaded = _shard_for(layout, recipe.build(_FRESH))
    optimizer_loaded = torch.optim.AdamW(loaded.parameters())
    rankless.load_checkpoint(folder / "run", model=loaded, optimizer=optimizer_loaded)
    yield from _describe(find_differences(model, loaded))
    yield from _describe(_compare_states(optimizer, optimizer_loaded))


def _compare_states(expected: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> list[str]:
    theirs, ours = expected.state_dict()["state"], optimizer.state_dict()["state"]
    if theirs.keys() != ours.keys():
        return ["parameters with a state"]
    pairs = [(f"{name} of parameter {i}", theirs[i][name], ours[i].get(name)) for i in theirs for name in theirs[i]]
    return [name for name, state, loaded in pairs if loaded is None or not is_equal(loaded, state)]


def _describe(differences: list[str]) -> Iterator[str]:
    if differences:
        yield f"{len(differences)} tensors differ, such as {differences[0]}"


#: The round trips, by what they call. Each yields what is wrong.
_ROUND_TRIPS = {
    "load_model": _load_pretrained,
    "load_model on meta": _load_onto_meta,
    "save_model": _save,
    "resume": _resume,
}
