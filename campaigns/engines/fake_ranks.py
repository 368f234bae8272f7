"""One rank of a parallel layout of vLLM in this process, without its peers: its process groups send nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype


@dataclass(frozen=True)
class Layout:
    """A layout: ``tp2``, ``pp2``, or ``ep2``, which is ``tp2`` with the experts divided."""

    name: str

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.name[2:])

    def make_config(self, folder: Path) -> VllmConfig:
        """Return vLLM's configuration for a model."""
        is_pipeline = self.name.startswith("pp")
        return EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            dtype="bfloat16",
            tensor_parallel_size=1 if is_pipeline else self.size,
            pipeline_parallel_size=self.size if is_pipeline else 1,
            enable_expert_parallel=self.name.startswith("ep"),
            distributed_executor_backend="external_launcher" if self.size > 1 else None,
        ).create_engine_config()


@contextmanager
def build_rank(folder: Path, layout: Layout, rank: int) -> Iterator[tuple[Any, VllmConfig]]:
    """Build the model of one rank, without weights, for use inside the ``with`` block."""
    config = layout.make_config(folder)
    parallel = config.parallel_config
    with ExitStack() as stack:
        for change in _fake_groups():
            stack.enter_context(change)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.size)
        stack.callback(gc.collect)
        stack.callback(_leave)
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(set_default_torch_dtype(torch.bfloat16))
        parallel_state.init_distributed_environment(layout.size, rank, "env://", rank, "fake")
        parallel_state.initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        yield initialize_model(config), config


def _fake_groups() -> Iterator[Any]:
    """Yield the changes with which vLLM's groups need no peers."""
    new_group, coordinator = dist.new_group, parallel_state.GroupCoordinator
    init = coordinator.__init__

    def init_alone(
        self: Any, group_ranks: Any, local_rank: int, *_: Any, group_name: str | None = None, **__: Any
    ) -> None:
        init(self, group_ranks, local_rank, "fake", False, False, group_name)

    def are_on_one_host(*_: Any, **__: Any) -> list[bool]:
        return [True] * dist.get_world_size()

    yield mock.patch.object(dist, "new_group", lambda ranks=None, *_, **__: new_group(ranks, backend="fake"))
    yield mock.patch.object(coordinator, "__init__", init_alone)
    yield mock.patch.object(parallel_state, "in_the_same_node_as", are_on_one_host)
    yield mock.patch.object(registry, "_run_in_subprocess", partial(_call))  # else one more Python for each class


def _call(function: Any) -> Any:
    return function()


def _leave() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    if dist.is_initialized():
        dist.destroy_process_group()
