"""vLLM's model of one rank of a layout, in a process that has no other ranks, and without memory for its weights.

``rankless show --for vllm`` lets such models take lazy tensors, to see which bytes each rank would read.

:mod:`rankless.cli.show.engine_reads` calls :func:`load_on_rank` for one rank after the other, in one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM logs to stdout, where the table is

import torch
import vllm
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from rankless.errors import InvalidArgumentError
from rankless.inference.engine_layout import EngineLayout
from rankless.observe.units import format_count

#: The name and the version of the engine.
ENGINE = f"vLLM {vllm.__version__}"


def load_on_rank(config: str, layout: EngineLayout, rank: int, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Let the model of a rank take weights. Return the size of its parameters in bytes.

    Args:
        config: The folder with ``config.json``, or the name of a model of the Hub.
        layout: How the ranks divide the model.
        rank: The rank.
        weights: The names and the tensors.

    Raises:
        InvalidArgumentError: vLLM cannot build the model in this layout, or cannot load these weights.
    """
    try:
        vllm_config = _make_config(config, layout)
        _pretend_groups(layout, rank)
        dtype = vllm_config.model_config.dtype
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(dtype):
            with _EmptyOnMeta():
                model = initialize_model(vllm_config)
            loaded = model.load_weights(iter(weights))
    except Exception as error:
        raise InvalidArgumentError(f"{ENGINE} cannot load {config} with {layout}: {error}") from error
    if loaded is not None and vllm_config.model_config.quantization is None:  # vLLM's own loader asks the same
        _check_complete(model, loaded, rank)
    nbytes: int = sum(parameter.nbytes for parameter in model.parameters())
    if nbytes == 0:
        raise InvalidArgumentError(
            f"with {layout} rank {rank} of {ENGINE} would have no layer of {config}: it has fewer layers than pipeline "
            "stages"
        )
    return nbytes


def _check_complete(model: torch.nn.Module, loaded: set[str], rank: int) -> None:
    """Raise ``InvalidArgumentError`` if the weights lacked a parameter of the model."""
    lacking = [name for name, _ in model.named_parameters() if name not in loaded]
    if lacking:
        raise InvalidArgumentError(
            f"the model here lacks {format_count(len(lacking), 'parameter')} of rank {rank} of {ENGINE}, such as "
            f"{lacking[0]}: vLLM would not start with it"
        )


def _make_config(config: str, layout: EngineLayout) -> VllmConfig:
    return EngineArgs(
        model=config,
        skip_tokenizer_init=True,
        enforce_eager=True,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        enable_expert_parallel=layout.has_expert_parallelism,
        # With this one vLLM does not look for a device for each rank.
        distributed_executor_backend="external_launcher",
    ).create_engine_config()


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters, which vLLM makes by ``torch.empty``, have no memory. Tensors that a model computes with have values.

    ``torch.device("meta")`` would take these as well, and vLLM could not list the experts of a rank.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute a function of torch."""
        del types
        options = kwargs or {}
        return func(*args, **({**options, "device": "meta"} if func is torch.empty else options))


class _LoneProcessGroup:
    """The size of a process group, and this rank in it: all that models ask for."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class _LoneGroup(GroupCoordinator):  # type: ignore[misc]
    """A group of vLLM without its other ranks: it cannot communicate."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:  # vLLM's own waits for the other ranks
        self.unique_name = "lone"
        self.ranks, self.rank, self.local_rank = list(ranks), rank, rank
        self.world_size, self.rank_in_group = len(self.ranks), self.ranks.index(rank)
        self.cpu_group = self.device_group = _LoneProcessGroup(self.world_size, self.rank_in_group)
        self.device = torch.device("cpu")
        self.use_device_communicator, self.device_communicator, self.mq_broadcaster = False, None, None


def _pretend_groups(layout: EngineLayout, rank: int) -> None:
    """Set the groups of vLLM, which are global variables of its module, to a rank's groups.

    vLLM numbers ranks as ``initialize_model_parallel`` does: the ranks of a pipeline stage one after the other. For
    example, with two stages of two ranks each, ranks 0 and 1 are the first stage.
    """
    first = rank - rank % layout.tensor
    whole = range(layout.size)
    stage = _LoneGroup(range(first, first + layout.tensor), rank)
    alone = _LoneGroup([rank], rank)
    pipeline = _LoneGroup(whole[rank % layout.tensor :: layout.tensor], rank)
    vars(parallel_state).update({"_WORLD": _LoneGroup(whole, rank), "_PP": pipeline})
    vars(parallel_state).update(dict.fromkeys(("_TP", "_ETP", "_EP"), stage))
    vars(parallel_state).update(dict.fromkeys(("_DP", "_DCP", "_PCP"), alone))
