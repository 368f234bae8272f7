"""One optimizer: trained and saved by some ranks, restored by a job of others, and compared with undisturbed runs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankless
from campaigns.optimizers.catalog import Recipe, list_recipes
from campaigns.optimizers.snapshot import Snapshot, find_differences, take_snapshot
from campaigns.optimizers.training import Run, start_run, take_steps
from campaigns.optimizers.verdict import (
    EXACT,
    FAILS_BY_ITSELF,
    REFUSED,
    REPORTED,
    SILENT,
    WRONG,
    Verdict,
    find_worst,
)
from tests.helpers.pool import Ranks

#: The step that is saved, and the last one.
SAVED, LAST = 4, 7

#: By layout the number of ranks that save, and those of the jobs that load. One rank has the model without FSDP2.
LAYOUTS = {"plain": (1, (1,)), "fsdp2": (2, (2, 1, 3))}

#: The snapshots of an undisturbed run after the steps ``SAVED`` and ``LAST``.
_Undisturbed = tuple[Snapshot, Snapshot]


def try_optimizers(ranks: Ranks, folder: Path, package: str, names: Sequence[str], layout: str) -> dict[str, Verdict]:
    """Return the verdict on each optimizer in a layout. The jobs that load are processes that have not saved."""
    saver, loaders = LAYOUTS[layout]
    verdicts = {name: [_try_save(ranks, folder / name, package, name, saver)] for name in names}
    ranks.close()
    for loader in loaders:
        for name, of_name in verdicts.items():
            if of_name[0].kind == EXACT:
                verdict = _call(ranks, loader, resume_run, str(folder / name), package, name, saver)
                of_name.append(verdict.at(f"on {loader} rank{'s' * (loader > 1)}") if len(loaders) > 1 else verdict)
    ranks.close()
    return {name: find_worst(of_name) for name, of_name in verdicts.items()}


def _try_save(ranks: Ranks, folder: Path, package: str, name: str, saver: int) -> Verdict:
    folder.mkdir()
    verdict = _call(ranks, saver, save_run, str(folder), package, name)
    has_ended = verdict.kind == WRONG and not (folder / _TRAINED).exists()
    return Verdict(FAILS_BY_ITSELF, f"a process ends or hangs: {verdict.text}") if has_ended else verdict


#: The file that rank 0 leaves before the first call of rankless.
_TRAINED = "trained"


def _call(ranks: Ranks, count: int, *call: Any) -> Verdict:
    try:
        outcomes = ranks.outcomes(count, *call)
    except Exception as error:  # noqa: BLE001 - a rank did not answer, or ended
        return Verdict.of_error(WRONG, error)
    return find_worst(
        outcome if isinstance(outcome, Verdict) else Verdict.of_error(WRONG, outcome) for outcome in outcomes
    )


def save_run(folder: str, package: str, name: str) -> Verdict:
    """Train and save, and keep the snapshots of the undisturbed run for :func:`resume_run`. Every rank calls it."""
    warnings.simplefilter("ignore")
    recipe, is_sharded = list_recipes(package)[name], dist.get_world_size() > 1
    try:
        run = start_run(recipe, is_sharded=is_sharded, seed=0)
        take_steps(recipe, run, 0, SAVED)
        saved = take_snapshot(run)
    except Exception as error:  # noqa: BLE001 - nothing of rankless was called
        return Verdict.of_error(FAILS_BY_ITSELF, error)
    if dist.get_rank() == 0:
        (Path(folder) / _TRAINED).touch()
    try:
        rankless.save_checkpoint(f"{folder}/run", "saved", *run, timeout=60)
    except rankless.RanklessError as error:
        return Verdict.of_error(REFUSED, error).at("save")
    except Exception as error:  # noqa: BLE001
        return Verdict.of_error(WRONG, error).at("save")
    restored = _restore_by_itself(recipe, run, is_sharded=is_sharded)
    try:
        take_steps(recipe, run, SAVED, LAST)
        undisturbed = saved, take_snapshot(run)
    except Exception as error:  # noqa: BLE001 - of a step that nothing has disturbed
        return Verdict.of_error(FAILS_BY_ITSELF, error)
    by_itself = restored if isinstance(restored, str) else _describe_own_restore(recipe, restored, undisturbed)
    torch.save((undisturbed, by_itself), f"{folder}/rank{dist.get_rank()}.pt")
    return Verdict(EXACT)


def _restore_by_itself(recipe: Recipe, run: Run, *, is_sharded: bool) -> Run | str:
    """Return another run that has loaded copies of a run's state dicts, or why there is none."""
    try:
        restored = start_run(recipe, is_sharded=is_sharded, seed=1)
        for part, target in zip(run, restored, strict=True):
            target.load_state_dict(copy.deepcopy(part.state_dict()))
    except Exception as error:  # noqa: BLE001 - nothing of rankless was called
        return Verdict.of_error(FAILS_BY_ITSELF, error).text
    return restored


def _describe_own_restore(recipe: Recipe, restored: Run, undisturbed: _Undisturbed) -> str:
    """Return what is wrong if state dicts alone restore a run; empty if its steps are those of the undisturbed one."""
    try:
        take_steps(recipe, restored, SAVED, LAST)
    except Exception as error:  # noqa: BLE001 - nothing of rankless was called
        return Verdict.of_error(FAILS_BY_ITSELF, error).text
    differences = find_differences(undisturbed[1], take_snapshot(restored))
    return f"its own state_dict() loses {differences[0]}" if differences else ""


def resume_run(folder: str, package: str, name: str, saver: int) -> Verdict:
    """Restore what ``saver`` ranks have saved, and take further steps. Every rank calls it."""
    warnings.simplefilter("ignore")
    recipe, count = list_recipes(package)[name], dist.get_world_size()
    rank = dist.get_rank() if count == saver else 0
    (saved, last), by_itself = torch.load(f"{folder}/rank{rank}.pt", weights_only=False)
    try:
        here = (saved, last) if count == saver else _run_undisturbed(recipe)
        run = start_run(recipe, is_sharded=count > 1, seed=1)
    except Exception as error:  # noqa: BLE001 - nothing of rankless was called
        return Verdict.of_error(FAILS_BY_ITSELF, error)
    try:
        restored = rankless.restore(f"{folder}/run", None, *run, timeout=60)
    except rankless.RanklessError as error:
        return Verdict.of_error(REFUSED, error)
    except Exception as error:  # noqa: BLE001
        return Verdict.of_error(WRONG, error)
    kind = SILENT if {"model", "optimizer"} <= set(restored.exact) else REPORTED
    differences = find_differences(saved, take_snapshot(run))
    if differences:
        return Verdict(kind, f"differs after the load: {', '.join(differences[:3])}")
    depends_on_ranks = bool(find_differences(saved, here[0]) or find_differences(last, here[1]))
    verdict = _compare_steps(recipe, run, None if depends_on_ranks else last)
    if verdict.kind == SILENT:
        return Verdict(FAILS_BY_ITSELF, by_itself) if by_itself else Verdict(kind, verdict.text)
    return Verdict(REPORTED, "all is equal") if (verdict.kind, kind) == (EXACT, REPORTED) else verdict


def _compare_steps(recipe: Recipe, run: Run, last: Snapshot | None) -> Verdict:
    """Take the steps after a load, and compare what a run then holds with the undisturbed one, if it is comparable."""
    try:
        take_steps(recipe, run, SAVED, LAST)
    except Exception as error:  # noqa: BLE001
        return Verdict.of_error(WRONG, error).at("the step after the load")
    differences = [] if last is None else find_differences(last, take_snapshot(run))
    if not differences:
        return Verdict(EXACT)
    return Verdict(SILENT, f"differs {LAST - SAVED} steps after the load: {', '.join(differences[:3])}")


def _run_undisturbed(recipe: Recipe) -> _Undisturbed:
    """Return the snapshots of a run on the ranks here."""
    run: Run = start_run(recipe, is_sharded=dist.get_world_size() > 1, seed=0)
    take_steps(recipe, run, 0, SAVED)
    saved = take_snapshot(run)
    take_steps(recipe, run, SAVED, LAST)
    return saved, take_snapshot(run)
