"""transformers' ``Trainer``, saving and resuming through holdfast: import it from here, and leave the rest as it is.

``TrainingArguments`` mean what they mean: ``output_dir``, ``save_steps``, ``save_total_limit``, ``save_only_model``,
``load_best_model_at_end``, and so does ``trainer.train(resume_from_checkpoint=True)``. One more argument,
``async_save``, writes in the background. A run resumes on any number of ranks, under DDP, FSDP or none of them.

No callback could do this: the ``Trainer`` works out what data to skip, and saves for itself, where it asks no callback.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers.trainer_callback import ExportableState

from holdfast.api import finalize, has_checkpoint, restore, save_checkpoint
from holdfast.errors import InvalidArgumentError
from holdfast.formats.native import is_native
from holdfast.run.retention import KeepLast, KeepTags, Retention
from holdfast.state.model.hf_config import has_adapters
from holdfast.storage.posix import local_path, path_exists, write_small

#: What the ``Trainer`` calls a checkpoint, and the file that it reads its own state from.
_TAG, _STATE = "checkpoint-{}", "trainer_state.json"

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class CheckpointMixin(_Base):
    """For a ``Trainer`` of another library: ``class MyTrainer(Checkpoints, SFTTrainer): pass``.

    Raises ``InvalidArgumentError`` with DeepSpeed, which has checkpoints of its own, if each checkpoint is to be pushed
    to the hub, and for an ``output_dir`` that is an address of an object store.
    """

    def __init__(self, *args: Any, async_save: bool = False, **options: Any) -> None:
        for one in (*args, *options.values()):
            if isinstance(one, transformers.TrainingArguments):
                local_path(str(one.output_dir))  # transformers would make a local folder of an address
        super().__init__(*args, **options)
        if self.is_deepspeed_enabled:
            raise InvalidArgumentError("DeepSpeed keeps its own checkpoints: use transformers' Trainer with it")
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            raise InvalidArgumentError("checkpoints are not pushed to the hub: use hub_strategy='end'")
        self._async_save = async_save
        self._resumed: Path | None = None
        self._warned = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """As ever; ``resume_from_checkpoint`` is ``True`` (the latest in ``output_dir``), a checkpoint, or a run."""
        try:
            self._resumed, state = self._find(resume_from_checkpoint)
            if self._resumed is None:
                return super().train(resume_from_checkpoint, *args, **options)
            with tempfile.TemporaryDirectory() as folder:
                write_small(Path(folder) / _STATE, json.dumps(state).encode())
                return super().train(folder, *args, **options)
        finally:
            finalize()

    def _find(self, given: str | bool | None) -> tuple[Path | None, Any]:
        """The checkpoint to go on from, if it is one of ours, and the ``Trainer``'s state in it."""
        if given is None or given is False:
            return None, None
        path = local_path(str(self.args.output_dir) if given is True else given)
        if not is_native(path) and not has_checkpoint(path):
            return None, None
        found = restore(path)
        folder = path / found.tag if has_checkpoint(path) else path
        return folder, found.user_content["trainer_state"]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        del model
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._warn_of_adapters()
        run, step = Path(self._get_output_dir(trial=trial)), self.state.global_step
        self._note(run)
        parts: dict[str, Any] = {"model": self.model_wrapped}
        if not self.args.save_only_model:
            parts |= {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "stateful": self._scaler()}
        save_checkpoint(
            run,
            _TAG.format(step),
            **parts,
            user_content={"trainer_state": json.loads(json.dumps(dataclasses.asdict(self.state)))},
            step=step,
            keep=self._policy(),
            overwrite=True,
            async_save=self._async_save,
        )

    def _warn_of_adapters(self) -> None:
        """Tell once what a checkpoint of a PEFT model is."""
        model = self.accelerator.unwrap_model(self.model_wrapped)
        if (
            self._warned
            or not self.is_world_process_zero()
            or not has_adapters(name for name, _ in model.named_modules())
        ):
            return
        self._warned = True
        warnings.warn(
            "this model has PEFT's adapters in it: each checkpoint holds all of its weights, those of the base model "
            "and those of the adapters, to resume from. Its folder 'model' is no Hugging Face checkpoint: neither "
            "from_pretrained() nor peft can open it. trainer.save_model() writes the adapter as peft does",
            stacklevel=2,
        )

    def _note(self, run: Path) -> None:
        """What the ``Trainer`` notes when it saves: its best checkpoint, and the state of its callbacks."""
        best = self.state.best_global_step
        if best and (best == self.state.global_step or path_exists(run / _TAG.format(best))):
            self.state.best_model_checkpoint = str(run / _TAG.format(best))
        for one in (*self.callback_handler.callbacks, self.control):
            if isinstance(one, ExportableState):
                known: Any = self.state.stateful_callbacks
                name = type(one).__name__
                if isinstance(known[name], list):
                    known[name].append(one.state())
                else:
                    known[name] = one.state()

    def _policy(self) -> Retention | None:
        if not self.args.save_total_limit:
            return None
        best = self.state.best_model_checkpoint
        last = KeepLast(self.args.save_total_limit)
        return last | KeepTags(Path(best).name) if best else last

    def _scaler(self) -> dict[str, Any] | None:
        scaler = getattr(self.accelerator, "scaler", None)
        return None if scaler is None else {"scaler": scaler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:  # else all is loaded when all is there
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        parts: dict[str, Any] = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        restore(self._resumed, model=self.model_wrapped, **parts, stateful=self._scaler(), rng=False)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_rng_state(checkpoint)
        else:
            restore(self._resumed, rng=True)

    def _load_best_model(self) -> None:
        finalize()
        best = Path(str(self.state.best_model_checkpoint))
        if is_native(best):
            restore(best, model=self.model_wrapped)
        else:
            super()._load_best_model()


class Trainer(CheckpointMixin, transformers.Trainer):
    """transformers' ``Trainer`` with holdfast's checkpoints: the same arguments, and ``async_save``."""
