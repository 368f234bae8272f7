"""The oracle: conditions that a run's directory must meet after any crash."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import rankless
from campaigns.crash.scenarios import Listing, Save
from campaigns.crash.training import Training
from rankless.errors import NoCheckpointError, RanklessError
from rankless.run.cleanup import clean_up
from rankless.run.records_folder import FOLDER
from rankless.storage.posix import list_hidden_directories

#: The only message that a single process may get about a checkpoint of several ranks.
_NO_RANK_CONTENT = r"loaded \S+, but not all that was asked for:\n  per_rank_content: [^\n]+\Z"


class Violation(AssertionError):  # noqa: N818 - of what is promised
    """A crash left a forbidden state."""


@dataclass(frozen=True)
class Promised:
    """The checkpoints before and after a step, which are equal if it was acknowledged.

    ``kept`` may be there, too: rank 0 removes them when other ranks have returned.
    """

    before: Listing
    after: Listing
    kept: Listing


def check_run(run: Path, promised: Promised, resumed: Save, training: Training) -> str:
    """Load, list, save again and clean up. Return what was found: ``"old"``, ``"new"`` or ``"none"``.

    Raises :class:`Violation`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a checkpoint that is skipped as corrupt is a violation, too
            warnings.filterwarnings("ignore", _NO_RANK_CONTENT, UserWarning)
            return _check_run(run, promised, resumed, training)
    except (RanklessError, UserWarning) as error:
        raise Violation(f"{type(error).__name__}: {error}") from error


def _check_run(run: Path, promised: Promised, resumed: Save, training: Training) -> str:
    before, after = promised.before, promised.after
    _require(rankless.has_checkpoint(run) or not before, "has_checkpoint tells of none")
    latest = _load_latest(run, training)
    listing = _load_all_listed(run, latest, training)
    _require(not latest or latest == list(listing.items())[-1], f"{latest} is loaded, and not the last of {listing}")
    allowed = {*before.items(), *after.items(), *promised.kept.items()}
    _require(set(listing.items()) <= allowed, f"{listing} are there, which is neither {before} nor {after}")
    is_new, is_old = (set(wanted.items()) <= set(listing.items()) for wanted in (after, before))
    _require(is_new or is_old, f"{listing} are there, which is less than {before} and than {after}")
    removed = {tag for tag in promised.kept if tag not in after}
    current = {tag: step for tag, step in listing.items() if tag not in removed}
    _require(before != after or current == after, f"{listing} are there, and not {after}, which was acknowledged")
    _check_next_save(run, listing, resumed, training)
    return "none" if not listing else "old" if listing == before != after else "new"


def _load_latest(run: Path, training: Training) -> tuple[str, int] | None:
    """Return the tag and the step that a resumed run loads; ``None`` if there is no checkpoint."""
    try:
        return _load_and_compare(run, None, training)
    except NoCheckpointError:
        _require(not rankless.has_checkpoint(run), "has_checkpoint tells of one that cannot be loaded")
        return None


def _load_all_listed(run: Path, latest: tuple[str, int] | None, training: Training) -> dict[str, int]:
    """Return the step of each listed checkpoint. All of them, and the latest, must be loadable."""
    infos = rankless.list_checkpoints(run)
    for info in infos:
        _require(info.status == "complete", f"{info.tag} is {info.status}: {info.problem}")
    known = dict([latest] if latest else [])
    return {info.tag: known.get(info.tag) or _load_and_compare(run, info.tag, training)[1] for info in infos}


def _load_and_compare(run: Path, tag: str | None, training: Training) -> tuple[str, int]:
    """Load a checkpoint and compare every bit."""
    training.set_step(0)
    restored = rankless.restore(run, tag, training.model, training.optimizer, rng=False)
    step = restored.user_content["step"]
    content = training.build_user_content(step)
    wrong = training.find_differences(step)
    if not restored.user_content["curve"].equal(content["curve"]):
        wrong.append("user content")
    if restored.per_rank_content not in ({"step": step}, None):
        wrong.append("rank content")
    _require(not wrong, f"{restored.tag} is of step {step}, but for {', '.join(wrong)}: a mixture")
    return restored.tag, step


def _check_next_save(run: Path, listing: Listing, resumed: Save, training: Training) -> None:
    """Resume the run and save: leftovers must not be taken for checkpoints, and all of them must be removable."""
    _load_latest(run, training)  # else what was loaded by its tag last would be continued
    resumed.run(run, training)
    expected = resumed.list_after(listing)
    _require(_load_latest(run, training) == (resumed.tag, resumed.step), "the next save is not the latest")
    infos = {info.tag: info for info in rankless.list_checkpoints(run)}
    _require(list(infos) == list(expected), f"after the next save {list(infos)} are there, and not {list(expected)}")
    leftovers = [folder.name for folder in list_hidden_directories(run) if infos[resumed.tag].run in folder.name]
    _require(not leftovers, f"the next save left {leftovers}")
    clean_up(run, None)
    left = [folder for folder in list_hidden_directories(run) if folder.name != FOLDER]
    _require(not left, f"{left} cannot be removed")
    _require(
        [info.tag for info in rankless.list_checkpoints(run)] == list(expected), "cleaning up removed a checkpoint"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)
