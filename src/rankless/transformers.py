"""transformers' ``Trainer`` with rankless's checkpoints: a drop-in replacement for ``transformers.Trainer``.

All ``TrainingArguments`` keep their meaning: ``output_dir``, ``save_steps``, ``save_total_limit``, ``save_only_model``,
``load_best_model_at_end``, and so does ``trainer.train(resume_from_checkpoint=True)``. Further arguments are
``checkpoint_dir``, which may be the URL of an object store, ``async_save``, which writes in the background,
``adapter_only``, which saves only PEFT adapters, and ``frozen``. A run resumes on any number of ranks, with DDP, FSDP
or neither.

The integration is a subclass and not a callback, because ``Trainer`` has no callbacks for saving and data skipping.

The ``Trainer`` calls it on every rank, in the thread of the training.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from rankless.api import finalize, restore, save_checkpoint
from rankless.errors import InvalidArgumentError, NoCheckpointError
from rankless.formats.native import NativeReader, is_native
from rankless.named_checkpoints import has_checkpoint
from rankless.ondisk.validation import check_choice, check_tag
from rankless.options import FROZEN
from rankless.run.lookup import resolve_checkpoint_path
from rankless.run.records_folder import keep_records_beside
from rankless.run.retention import KeepLast, KeepTags, Retention
from rankless.storage.directory_trees import remove_tree
from rankless.storage.location import parse_location
from rankless.storage.posix import is_file, list_names, local_path, make_directory, path_exists, read_small, write_small
from rankless.storage.store import store_of

#: The ``Trainer``'s name of a checkpoint, and the file that it reads its own state from.
_TAG, _STATE_FILE = "checkpoint-{}", "trainer_state.json"

#: The file that the ``Trainer`` puts into the directory of a checkpoint before it saves at SIGTERM
#: (``enable_jit_checkpoint``).
_MARK = "checkpoint-is-incomplete.txt"

#: How the names of numbers end that say how long something took, which is no metric of the model.
_TIMINGS = ("_runtime", "_per_second", "_time", "_flos")

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class CheckpointMixin(_Base):
    """A mixin for the ``Trainer`` of another library: ``class MyTrainer(CheckpointMixin, SFTTrainer): pass``.

    Args:
        args: The positional arguments of the ``Trainer``.
        checkpoint_dir: The run directory of the checkpoints, or its URL in an object store; ``output_dir`` by default.
            ``resume_from_checkpoint=True`` means the latest checkpoint there.
        async_save: Write checkpoints in the background.
        adapter_only: Save of a model with PEFT adapters only the adapters, as PEFT does, and the files that a resumed
            run needs in addition. By default checkpoints have the base model, too. Either way their folder ``adapter``
            is one of PEFT.
        frozen: See :func:`rankless.save_checkpoint`: ``"apart"`` puts parameters that are not trained into files of
            their own, which later checkpoints share.
        options: The keyword arguments of the ``Trainer``.

    Raises:
        InvalidArgumentError: DeepSpeed is enabled, which has its own checkpoints; or each checkpoint would be pushed to
            the hub; or ``output_dir``, which is always a local folder, is the URL of an object store.
    """

    def __init__(
        self,
        *args: Any,
        checkpoint_dir: str | PathLike[str] | None = None,
        async_save: bool = False,
        adapter_only: bool = False,
        frozen: str = "together",
        **options: Any,
    ) -> None:
        check_choice("frozen", frozen, FROZEN)
        for argument in (*args, *options.values()):
            if isinstance(argument, transformers.TrainingArguments):
                _check_output_dir(str(argument.output_dir))
        super().__init__(*args, **options)
        if self.is_deepspeed_enabled:
            raise InvalidArgumentError("DeepSpeed keeps its own checkpoints: use transformers' Trainer with it")
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            raise InvalidArgumentError("checkpoints are not pushed to the hub: use hub_strategy='end'")
        self._checkpoint_dir = None if checkpoint_dir is None else parse_location(checkpoint_dir)
        self._async_save = async_save
        self._resumed: Path | None = None
        #: The temporary directory that the ``Trainer`` itself writes into during a save.
        self._scratch: Path | None = None
        self._adapter_only, self._frozen = adapter_only, frozen

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as ``transformers.Trainer`` does, and wait for background saves at the end.

        Args:
            resume_from_checkpoint: ``True`` for the latest checkpoint in ``checkpoint_dir``, or the path or URL of a
                checkpoint or of a run directory. Checkpoints of transformers' own ``Trainer`` are accepted, too.
            args: Further positional arguments of ``transformers.Trainer.train``.
            options: Further keyword arguments of ``transformers.Trainer.train``.

        Returns:
            The result of ``transformers.Trainer.train``.

        Raises:
            NoCheckpointError: There is nothing to resume from in ``checkpoint_dir`` or at a URL.
        """
        try:
            self._resumed, content = self._find_checkpoint(resume_from_checkpoint)
            if self._resumed is None:
                return super().train(resume_from_checkpoint, *args, **options)
            with tempfile.TemporaryDirectory() as folder:
                _copy_files(self._resumed, content.get("files", ()), Path(folder))
                write_small(Path(folder) / _STATE_FILE, json.dumps(content["trainer_state"]).encode())
                return super().train(folder, *args, **options)
        finally:
            finalize()

    def _find_checkpoint(self, resume_from: str | bool | None) -> tuple[Path | None, Any]:
        """Return the rankless checkpoint to resume from and its user content, or two ``None``."""
        if resume_from is None or resume_from is False:
            return None, None
        run = self._checkpoint_dir or local_path(str(self.args.output_dir))
        path = resolve_checkpoint_path(run if resume_from is True else parse_location(resume_from))
        if not is_native(path) and not has_checkpoint(path):
            if store_of(path).is_remote or (resume_from is True and self._checkpoint_dir is not None):
                raise NoCheckpointError(f"there is no checkpoint of rankless in {path}")
            return None, None
        result = restore(path)
        folder = path / result.tag if has_checkpoint(path) else path
        return resolve_checkpoint_path(folder), result.user_content

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        output_dir, step = Path(self._get_output_dir(trial=trial)), self.state.global_step
        run = self._run_directory(output_dir)
        with tempfile.TemporaryDirectory() as folder:
            files = self._run_own_save(Path(folder), model, trial)
        self._note_best_checkpoint(run)
        if getattr(self.args, "enable_jit_checkpoint", False):
            self._remove_mark(output_dir / _TAG.format(step))
        components: dict[str, Any] = {"model": self.model_wrapped}
        if not self.args.save_only_model:
            components |= {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
            components |= {"stateful": self._stateful_objects()}
        if self._checkpoint_dir is None and self.is_world_process_zero():
            keep_records_beside(run)  # the output of the training, which may also be uploaded to the Hub as a whole
        state = json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n"
        # The states of other ranks' trainers say which rank they are of.
        content = {"trainer_state": json.loads(state), "files": sorted(files)}
        save_checkpoint(
            run,
            _TAG.format(step),
            **components,
            files=files | {_STATE_FILE: state.encode()},
            adapter_only=self._adapter_only,
            frozen=self._frozen,
            user_content=content if self.is_world_process_zero() else None,
            step=step,
            metrics=_find_metrics(self.state.log_history, step),
            keep=self._retention_policy(),
            overwrite=True,
            async_save=self._async_save,
        )

    def _run_directory(self, output_dir: Path) -> Path:
        """Return the run directory of the checkpoints. ``output_dir`` belongs to the training or to one trial of it."""
        if self._checkpoint_dir is None:
            return output_dir
        return self._checkpoint_dir / output_dir.relative_to(str(self.args.output_dir))

    def _run_own_save(self, folder: Path, model: Any, trial: Any) -> dict[str, bytes]:
        """Call the ``Trainer``'s save without the parts that rankless saves, and return the files that it has written.

        It updates the states of callbacks, and subclasses add to it: TRL writes a model card, and states of its own.
        """
        target = folder / _TAG.format(self.state.global_step)
        make_directory(target)
        self._scratch = folder
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._scratch = None
        return _read_files(target)

    def _remove_mark(self, folder: Path) -> None:
        """Remove a directory that has only the mark of an incomplete checkpoint: rankless needs no mark."""
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero() and path_exists(folder) and list_names(folder) <= {_MARK}:
            remove_tree(folder)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._scratch is None else str(self._scratch)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as ``transformers.Trainer`` does; as a part of a checkpoint it is saved by rankless."""
        if self._scratch is None:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: they are in the checkpoint."""

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: it is in the checkpoint."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: it is in the checkpoint."""

    def _note_best_checkpoint(self, run: Path) -> None:
        """Record in the ``Trainer``'s state its best checkpoint, which it looked for in the temporary directory."""
        best = self.state.best_global_step
        if best and (best == self.state.global_step or _has_checkpoint(run / _TAG.format(best))):
            self.state.best_model_checkpoint = str(run / _TAG.format(best))

    def _retention_policy(self) -> Retention | None:
        if not self.args.save_total_limit:
            return None
        best = self.state.best_model_checkpoint
        last = KeepLast(self.args.save_total_limit)
        return last | KeepTags(Path(best).name) if best else last

    def _stateful_objects(self) -> dict[str, Any] | None:
        scaler = getattr(self.accelerator, "scaler", None)
        return None if scaler is None else {"scaler": scaler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:  # else the model is loaded together with the optimizer
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # of a rankless checkpoint only files of subclasses
        if self._resumed is None:
            return
        components: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        restore(self._resumed, model=self.model_wrapped, **components, stateful=self._stateful_objects(), rng=False)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_rng_state(checkpoint)
        else:
            restore(self._resumed, rng=True)

    def _load_best_model(self) -> None:
        finalize()
        store = store_of(self._checkpoint_dir or Path())
        best = store.path(str(self.state.best_model_checkpoint))
        if is_native(resolve_checkpoint_path(best)):
            restore(best, model=self.model_wrapped)
        else:
            super()._load_best_model()


def _check_output_dir(output_dir: str) -> None:
    """Raise ``InvalidArgumentError`` for a URL: transformers would create a local directory of this name."""
    if "://" in output_dir:
        raise InvalidArgumentError(
            f"output_dir={output_dir!r} must be a local folder, because transformers writes other files there: pass "
            "the URL as Trainer(checkpoint_dir=…)"
        )


def _has_checkpoint(path: Path) -> bool:
    """Return whether there is something at the path of a checkpoint."""
    resolved = resolve_checkpoint_path(path)
    return store_of(resolved).path_exists(resolved)


def _find_metrics(log_history: Sequence[Mapping[str, Any]], step: int) -> dict[str, float]:
    """Return the values that the ``Trainer`` has logged at a step: the loss, and the metrics of an evaluation."""
    logged = [(name, value) for entry in log_history if entry.get("step") == step for name, value in entry.items()]
    return {
        name: float(value)
        for name, value in logged
        if isinstance(value, Real) and name not in {"step", "epoch"} and not name.endswith(_TIMINGS)
    }


def _read_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the files that a ``Trainer`` has written into its checkpoint, without its state, by name.

    Raises ``InvalidArgumentError`` for a folder.
    """
    paths = [folder / name for name in sorted(list_names(folder)) if name != _STATE_FILE]
    for path in paths:
        check_tag(path.name)
        if not is_file(path):
            raise InvalidArgumentError(
                f"this Trainer writes the folder {path.name!r} into its checkpoints; only files are supported"
            )
    return {path.name: read_small(path) for path in paths}


def _copy_files(checkpoint: Path, names: Sequence[str], folder: Path) -> None:
    """Copy files of a checkpoint for the ``Trainer``. Raises ``CorruptCheckpointError`` if one is not as saved."""
    reader = NativeReader(checkpoint)
    for name in names:
        write_small(folder / check_tag(name), reader.read_small_file(name))


class Trainer(CheckpointMixin, transformers.Trainer):
    """transformers' ``Trainer`` with rankless's checkpoints. See :class:`CheckpointMixin` for its further arguments."""
