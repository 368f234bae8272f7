"""The load format ``rankless`` of vLLM: each worker reads just the bytes of its own parameters, and proves them.

vLLM makes one in each worker, and calls it in the thread that loads. All workers must open the same sources in the same
order: each opening is a session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import vllm
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.distributed import get_tp_group, get_world_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from rankless.engine.comm.process_group_argument import SELF, ProcessGroupArgument
from rankless.errors import FormatError, MismatchError, NoCheckpointError
from rankless.inference.filled_parameters import check_filled
from rankless.inference.loader_options import LoaderOptions
from rankless.inference.open_weights import ModelWeights, open_weights
from rankless.observe.units import format_count
from rankless.storage.location import RUN_PREFIX
from rankless.storage.posix import is_directory, is_file, list_names
from rankless.vllm.used_names import find_missing_names, note_used_names

#: A child of vLLM's own logger, which has its handlers.
_log = init_logger("vllm.rankless")

#: The prefixes of names, each with the weights of a source.
_Opened = Sequence[tuple[str, ModelWeights]]

#: A model of the Hub is called ``owner/name``.
_PARTS_OF_HUB_NAMES = 2

#: The attributes of vLLM's own loader that are used, besides its public methods.
_USED_NAMES = ("Source", "_prepare_weights", "get_all_weights", "load_weights")


class RanklessVllmLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's loader with tensors of :func:`rankless.open_weights`. vLLM's model decides which bytes are read."""

    def __init__(self, load_config: LoadConfig) -> None:
        missing = [name for name in _USED_NAMES if not hasattr(DefaultModelLoader, name)]
        if missing:
            raise FormatError(
                f"the load format rankless does not know vLLM {vllm.__version__}: its DefaultModelLoader has no "
                f"{', '.join(missing)}; use --load-format auto, or a newer rankless"
            )
        self._options = LoaderOptions.from_config(load_config.model_loader_extra_config or {})
        super().__init__(dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={}))
        #: The place of the weights, if they are not in the model's own files. A draft model has its own.
        self._path = self._options.path
        self._is_draft = False
        #: The work at the end of :meth:`load_model`, while it runs.
        self._late_steps: ExitStack | None = None
        #: The prefix of the names and the weights of each source, while the model takes them.
        self._opened: list[tuple[str, ModelWeights]] = []
        #: Those that were opened for a reload, until vLLM asks for the first tensor.
        self._reloaded: list[tuple[str, ModelWeights]] = []
        #: The weights with a report that is not logged yet.
        self._unreported: list[ModelWeights] = []

    @property
    def _origin(self) -> str:
        """The mark of a model with weights at the option ``path``: vLLM removes it for a reload from elsewhere."""
        return f"{RUN_PREFIX}{self._options.path}"

    def download_model(self, model_config: ModelConfig) -> None:
        """Download a model of the Hugging Face Hub, unless the weights are elsewhere."""
        if self._options.path is None:
            super().download_model(model_config)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Make the model and load it."""
        speculative = vllm_config.speculative_config
        target = vllm_config.model_config if speculative is None else speculative.target_model_config
        self._is_draft = model_config.runner == "draft"
        if model_config.model != target.model:
            self._path = None
        with ExitStack() as self._late_steps:
            model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        self._late_steps = None
        self._log_reports()
        if self._path is not None:
            model_config.model_weights = self._origin
        return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the weights into a model. All workers call it."""
        with ExitStack() as loads:
            for source in self._list_sources(model, model_config):
                weights = loads.enter_context(self._open(source))
                self._opened.append((source.prefix, weights))
                self._unreported.append(weights)
            try:
                super().load_weights(model, model_config)
                if model_config.quantization is None:  # else layers have parameters that are filled later
                    check_filled(model, [weights for _, weights in self._opened])
            finally:
                opened, self._opened = self._opened, []
            loads.callback(_note_used, model, opened)
            if self._late_steps is not None and _is_quantized_late(model):
                self._late_steps.push(loads.pop_all())
                return
        self._log_reports()

    def _log_reports(self) -> None:
        for weights in self._unreported:
            _log.info_once("rankless has loaded %s: %s", weights.report.path, str(weights.report))
        self._unreported = []

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the names and the tensors of all weights. Outside of :meth:`load_weights` they are for a reload."""
        if self._opened:
            return self._iterate_opened()
        return self._iterate_reload(self._open_for_reload(model_config, model))

    def _iterate_opened(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        for prefix, weights in self._opened:
            yield from ((prefix + name, tensor) for name, tensor in weights)

    def _open_for_reload(self, model_config: ModelConfig, model: nn.Module) -> ExitStack:
        """Open the weights for ``reload_weights`` of vLLM, which makes a loader for it. All workers call it.

        It is called before vLLM takes the parameters apart: weights that cannot be opened leave the engine as it is.
        """
        if model_config.model_weights != self._origin:
            name = str(model_config.model)
            self._path = name if _is_place(name) else None
            self._options = dataclasses.replace(self._options, tag=None)
        with ExitStack() as loads:
            for source in self._list_sources(model, model_config):
                self._opened.append((source.prefix, loads.enter_context(self._open(source))))
            opened, self._opened = self._opened, []
            _check_names(model, opened)
            self._reloaded = opened
            return loads.pop_all()

    def _iterate_reload(self, loads: ExitStack) -> Generator[tuple[str, torch.Tensor], None, None]:
        with loads:
            opened, self._reloaded = self._reloaded, []
            for prefix, weights in opened:
                yield from ((prefix + name, tensor) for name, tensor in weights)
            for _, weights in opened:
                weights.read_held()  # vLLM finishes some layers after the last tensor
                self._unreported.append(weights)
        self._log_reports()

    def _list_sources(self, model: nn.Module, model_config: ModelConfig) -> Iterable[DefaultModelLoader.Source]:
        """Return where the weights are: of some models, parts are in folders of their own."""
        yield DefaultModelLoader.Source(
            model_config.model,
            model_config.revision,
            prefix="",
            fall_back_to_pt=False,
            allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
        )
        yield from getattr(model, "secondary_weights", ())

    def _open(self, source: DefaultModelLoader.Source) -> ModelWeights:
        # The last stage of a pipeline loads a draft model alone.
        options, ranks = self._options, get_tp_group() if self._is_draft else get_world_group()
        path, tag = self._path, options.tag
        if path is None or source.prefix:
            tag = None
            path, _, is_safetensors, *_ = self._prepare_weights(
                source.model_or_path, source.subfolder, source.revision, False, source.allow_patterns_overrides
            )
            if not is_safetensors:
                raise FormatError(f"{path} has no safetensors files: use --load-format auto")
        group: ProcessGroupArgument = ranks.cpu_group if ranks.world_size > 1 else SELF
        return open_weights(path, tag, verify=options.verify, process_group=group, timeout=options.timeout)


def _note_used(model: nn.Module, opened: _Opened) -> None:
    note_used_names(model, (prefix + name for prefix, weights in opened for name in weights.used_names))


def _check_names(model: nn.Module, opened: _Opened) -> None:
    """Raise ``MismatchError`` if weights lack a tensor that the model was loaded from: it would keep the old values."""
    names = {prefix + name for prefix, weights in opened for name in weights.names}
    if missing := find_missing_names(model, names):
        raise MismatchError(
            f"{opened[0][1].path} lacks {format_count(len(missing), 'tensor')} of this model, such as {missing[0]!r}: "
            "the engine keeps the weights that it has"
        )


def _is_place(name: str) -> bool:
    """Return whether a name is a URL, or a checkpoint or run directory: vLLM knows folders and models of the Hub.

    For example, ``s3://models/llama`` is one, and ``meta-llama/Llama-3.1-8B`` is a name of the Hub.
    """
    path = Path(name)
    if "://" in name or is_file(path):
        return True
    if is_directory(path):
        return not any(one.endswith(".safetensors") for one in list_names(path))
    if path.is_absolute() or len(path.parts) > _PARTS_OF_HUB_NAMES:
        raise NoCheckpointError(f"there is no model in {name}")
    return False


def _is_quantized_late(model: nn.Module) -> bool:
    """Return whether vLLM quantizes parts of a model itself: it loads them layer by layer, and the last ones late."""
    return any(getattr(getattr(part, "quant_method", None), "uses_meta_device", False) for part in model.modules())
