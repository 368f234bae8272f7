"""The load format ``rankless`` of SGLang: each rank reads just the bytes of its own parameters, and proves them.

SGLang makes one in each process of a rank, and calls it in the thread that loads. All ranks of the load group must open
the same sources in the same order: each opening is a session.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Generator, Iterable
from contextlib import ExitStack
from typing import Any

import sglang
import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import _DEFAULT_LOAD_GROUP, LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from rankless.engine.comm.process_group_argument import SELF, ProcessGroupArgument
from rankless.errors import FormatError, InvalidArgumentError
from rankless.inference.filled_parameters import check_filled
from rankless.inference.loader_options import LoaderOptions
from rankless.inference.open_weights import ModelWeights, open_weights

_log = logging.getLogger(__name__)

#: The attributes of SGLang's own loader that are used, besides its public methods.
_USED_NAMES = (
    "Source",
    "_get_weights_iterator",
    "_prepare_weights",
    "load_weights_and_postprocess",
    "load_weights_only",
    "postprocess_weights",
)

#: The beginnings of the names of quantizations that SGLang has own loaders for.
_OWN_LOADERS = ("modelopt", "auto-round")

_Weights = Iterable[tuple[str, torch.Tensor]]


class RanklessSglangLoader(DefaultModelLoader):  # type: ignore[misc]
    """SGLang's loader with tensors of :func:`rankless.open_weights`. SGLang's model decides which bytes are read."""

    def __init__(self, load_config: LoadConfig) -> None:
        missing = [name for name in _USED_NAMES if not hasattr(DefaultModelLoader, name)]
        if missing:
            raise FormatError(
                f"the load format rankless does not know SGLang {sglang.__version__}: its DefaultModelLoader has no "
                f"{', '.join(missing)}; use --load-format auto, or a newer rankless"
            )
        self._options = LoaderOptions.from_config(load_config.model_loader_extra_config or {})
        super().__init__(dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={}))
        #: Where the weights are, if not in the model's own files: it is not for a draft model.
        self._path = self._options.path
        #: The exit stack that ends the loads, while a model takes weights, and the weights that it has opened.
        self._loads: ExitStack | None = None
        self._opened: list[ModelWeights] = []

    def download_model(self, model_config: ModelConfig) -> None:
        """Download a model of the Hugging Face Hub, unless the weights are elsewhere."""
        if self._options.path is None:
            super().download_model(model_config)

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        """Make the model and load it."""
        quantization = str(model_config.quantization or "")
        if quantization.startswith(_OWN_LOADERS):
            raise InvalidArgumentError(
                f"--load-format rankless: for --quantization {quantization} SGLang has a loader of its own; use "
                "--load-format auto"
            )
        if model_config.is_draft_model:
            self._path = None
        model: nn.Module = super().load_model(model_config=model_config, device_config=device_config)
        return model

    def load_weights_and_postprocess(self, model: nn.Module, weights: _Weights, target_device: torch.device) -> None:
        """Load the weights into a model. All ranks of the load group call it."""
        try:
            # Some models copy in threads that go on when they have taken all weights.
            with ExitStack() as self._loads:
                self.load_weights_only(model, weights, target_device)
                if getattr(model, "quant_config", None) is None:
                    check_filled(model, self._opened)
        finally:
            opened, self._opened, self._loads = self._opened, [], None
        for one in opened:
            _log.info("rankless has loaded %s: %s", one.report.path, one.report)
        self.postprocess_weights(model, target_device)

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source, **options: Any
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        # It is called before the load begins, and iterated in it.
        if self._loads is None or self.load_config.draft_model_idx is not None:
            _log.warning(
                "rankless does not load %s: SGLang's own loader does, and verifies nothing", source.model_or_path
            )
            yield from super()._get_weights_iterator(source, **options)
            return
        weights = self._loads.enter_context(self._open(source))
        self._opened.append(weights)
        yield from ((source.prefix + name, tensor) for name, tensor in weights)

    def _open(self, source: DefaultModelLoader.Source) -> ModelWeights:
        options = self._options
        path, tag = self._path, options.tag
        if path is None or source.prefix:
            tag = None
            path, _, is_safetensors = self._prepare_weights(
                source.model_or_path, source.revision, False, source.allow_patterns_overrides
            )
            if not is_safetensors:
                raise FormatError(f"{path} has no safetensors files: use --load-format auto")
        return open_weights(path, tag, verify=options.verify, process_group=self._find_group(), timeout=options.timeout)

    def _find_group(self) -> ProcessGroupArgument:
        """Return the ranks that load now: with pipeline stages or a draft model these may be some of all ranks."""
        group = self.load_config.load_group
        if group is _DEFAULT_LOAD_GROUP:
            group = get_world_group()
        return SELF if group is None or group.world_size == 1 else group.cpu_group
