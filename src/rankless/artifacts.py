"""Artifacts of Weights & Biases and models of MLflow that refer to a checkpoint, and the way back to it.

No file is copied or uploaded: an artifact has the path of a checkpoint and its id. A tag may mean another checkpoint
later, after a save with ``overwrite=True``; the id never does. All ranks may call the functions; only the first one
logs.

They run after a save, outside of votes: an error is raised on the first rank alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from rankless import view
from rankless.errors import CheckpointReplacedError, FormatError, InvalidArgumentError, NoCheckpointError
from rankless.loggers import current_wandb_run, find_mlflow_run, is_first_rank
from rankless.run.tag_arguments import TagArgument
from rankless.storage.location import RUN_PREFIX
from rankless.storage.store import store_of
from rankless.view import Checkpoint

#: The prefix of the tags of a model of MLflow.
_PREFIX = "rankless."

#: The tag of a model of MLflow that has its files elsewhere.
_IS_EXTERNAL = "mlflow.model.isExternal"

#: The most characters of names and aliases that both systems accept.
_NAME_CHARACTERS = 128

#: The most characters of the name of a metric in MLflow.
_METRIC_CHARACTERS = 250


@dataclass(frozen=True)
class _Reference:
    """The content of an artifact: the place of a checkpoint, its identity, and its contents."""

    path: str
    tag: str
    id: str
    step: float | None
    format: str
    nbytes: int
    metrics: dict[str, float | None]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Reference:
        identity = checkpoint.identity
        if identity is None:
            raise InvalidArgumentError(
                f"{checkpoint.path} is no checkpoint of rankless, so it has no id: convert it, or log its path yourself"
            )
        # In an object store the folder has the id in its name; in a directory it may have a hidden name for a moment.
        is_object = store_of(checkpoint.path).is_remote
        path = checkpoint.path if is_object else checkpoint.path.parent / checkpoint.tag
        return cls(
            str(path),
            checkpoint.tag,
            identity.id,
            checkpoint.step,
            checkpoint.format,
            checkpoint.nbytes,
            checkpoint.metrics,
        )


def log_wandb_artifact(
    path: str | PathLike[str],
    tag: TagArgument = None,
    *,
    name: str | None = None,
    aliases: Iterable[str] = (),
    run: Any = None,
) -> Any:
    """Log an artifact of Weights & Biases of type ``model`` that refers to a checkpoint.

    Its metadata are ``path``, ``tag``, ``id``, ``step``, ``format``, ``nbytes`` and ``metrics``. Its one reference is
    the path of the checkpoint, as a ``file://`` URL or, in an object store, as a URL for :func:`rankless.open`: that
    begins with ``rankless+``, so that W&B asks neither the store nor another package for it.

    Args:
        path: A checkpoint, or a run directory.
        tag: As in :func:`rankless.open`.
        name: The name of the artifact: each checkpoint is a version of it; by default ``checkpoint-`` and the id of the
            run of W&B.
        aliases: Aliases of this version, besides the tag of the checkpoint. W&B accepts no ``/`` and ``:``; in the tag
            they become ``_``.
        run: A run of ``wandb.init``; by default the current one.

    Returns:
        The ``wandb.Artifact``; ``None`` on other ranks than the first.

    Raises:
        InvalidArgumentError: There is no run of W&B, or the checkpoint is not one of rankless.
        NoCheckpointError: There is no checkpoint; and all other errors of :func:`rankless.open`.
    """
    if not is_first_rank():
        return None
    import wandb  # noqa: PLC0415 - an optional package

    run = current_wandb_run() if run is None else run
    checkpoint = view.open(path, tag)
    reference = _Reference.of(checkpoint)
    artifact = wandb.Artifact(name or f"checkpoint-{run.id}", type="model", metadata=asdict(reference))
    # W&B takes an artifact with the same entries for the same version: so the entry has the id in its name.
    artifact.add_reference(_make_url(checkpoint, reference), name=reference.id, checksum=False)
    return run.log_artifact(artifact, aliases=[_clean_name(reference.tag, "/:"), *aliases])


def _make_url(checkpoint: Checkpoint, reference: _Reference) -> str:
    if store_of(checkpoint.path).is_remote:
        return f"{RUN_PREFIX}{reference.path}"
    return (checkpoint.path.parent / reference.tag).as_uri()


def log_mlflow_model(
    path: str | PathLike[str], tag: TagArgument = None, *, name: str | None = None, run_id: str | None = None
) -> Any:
    """Log an external model of MLflow that refers to a checkpoint.

    MLflow has external models for models that have their files elsewhere: it is in the list of the models of the run,
    and can be searched for by its metrics. A data set is an input of a run, and a file of metadata cannot be searched
    for. The model is of type ``checkpoint``; its tags are ``rankless.path``, ``rankless.tag``, ``rankless.id``,
    ``rankless.step``, ``rankless.format`` and ``rankless.nbytes``. The metrics of the checkpoint that are finite become
    metrics of the model; characters that MLflow does not accept in their names become ``_``. This needs MLflow 3.

    Args:
        path: A checkpoint, or a run directory.
        tag: As in :func:`rankless.open`.
        name: The name of the model; by default the tag. Characters that MLflow does not accept become ``_``.
        run_id: The id of a run of MLflow; by default the active run of this thread.

    Returns:
        The ``mlflow.entities.LoggedModel``; ``None`` on other ranks than the first.

    Raises:
        InvalidArgumentError: There is no run of MLflow, or the checkpoint is not one of rankless.
        NoCheckpointError: There is no checkpoint; and all other errors of :func:`rankless.open`.
    """
    if not is_first_rank():
        return None
    import mlflow  # noqa: PLC0415 - an optional package

    client = mlflow.MlflowClient()
    source = client.get_run(find_mlflow_run(run_id)).info
    reference = _Reference.of(view.open(path, tag))
    fields = {key: value for key, value in asdict(reference).items() if key != "metrics" and value is not None}
    # mlflow.create_external_model() needs pandas, and writes a file into the store of the artifacts.
    model = client.create_logged_model(
        source.experiment_id,
        name or _clean_name(reference.tag, "/:.%\"'"),
        source.run_id,
        tags={_IS_EXTERNAL: "true", **{f"{_PREFIX}{key}": str(value) for key, value in fields.items()}},
        model_type="checkpoint",
    )
    if metrics := {_clean_metric(key): value for key, value in reference.metrics.items() if value is not None}:
        mlflow.log_metrics(metrics, int(reference.step or 0), run_id=source.run_id, model_id=model.model_id)
    return client.finalize_logged_model(model.model_id, "READY")


def open_artifact(artifact: Any) -> Checkpoint:
    """Open the checkpoint that an artifact refers to. It is the very one that was logged, or an error is raised.

    Args:
        artifact: A ``wandb.Artifact`` of :func:`log_wandb_artifact`, a ``LoggedModel`` of :func:`log_mlflow_model`, or
            a mapping with the metadata of the one or the tags of the other.

    Returns:
        The open checkpoint.

    Raises:
        NoCheckpointError: The checkpoint was removed, or its path does not exist on this host.
        CheckpointReplacedError: Another checkpoint is at its path.
        InvalidArgumentError: The artifact does not refer to a checkpoint.
        StorageError: As all other errors of :func:`rankless.open`.
    """
    path, tag, identifier = _read_reference(artifact)
    description = f"the checkpoint {tag!r} with the id {identifier!r} at {path!r}"
    try:
        checkpoint = view.open(path)
    except NoCheckpointError as error:
        raise NoCheckpointError(f"{description} was removed, or is on another host: {error}") from error
    except FormatError as error:
        raise CheckpointReplacedError(f"{description} was replaced: {error}") from error
    if checkpoint.identity is None or checkpoint.identity.id != identifier:
        raise CheckpointReplacedError(f"{description} was replaced: {checkpoint.path} is another checkpoint")
    return checkpoint


def _read_reference(artifact: Any) -> tuple[str, str, str]:
    """Return the path, the tag and the id. Raises ``InvalidArgumentError`` if they are not there."""
    fields = artifact if isinstance(artifact, Mapping) else getattr(artifact, "metadata", None)
    fields = getattr(artifact, "tags", None) if fields is None else fields
    if isinstance(fields, Mapping):
        for prefix in ("", _PREFIX):
            path, tag, identifier = (fields.get(f"{prefix}{key}") for key in ("path", "tag", "id"))
            if isinstance(path, str) and isinstance(tag, str) and isinstance(identifier, str):
                return path, tag, identifier
    raise InvalidArgumentError(
        "the artifact does not refer to a checkpoint: it has no path, tag and id; pass one of log_wandb_artifact() or "
        "log_mlflow_model()"
    )


def _clean_name(tag: str, refused: str) -> str:
    """Return a tag as a name without characters that are refused.

    For example, ``a/b`` with ``/:`` refused becomes ``a_b``.
    """
    return "".join("_" if character in refused else character for character in tag)[:_NAME_CHARACTERS]


def _clean_metric(name: str) -> str:
    """Return the name of a metric in MLflow, which may treat it as the path of a file.

    For example, ``a/../b@1`` becomes ``a/_../b_1``.
    """
    return re.sub(r"(^|/)(?=[./]|$)", r"\1_", re.sub(r"[^\w\-. /]", "_", name))[:_METRIC_CHARACTERS]
