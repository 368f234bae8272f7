"""The plugin that vLLM calls in each of its processes: the entry point ``vllm.general_plugins``.

It must be quick and import no model: each process of vLLM calls it.
"""

from __future__ import annotations

#: The name of the load format, and of the backend for weight transfers.
LOAD_FORMAT = "rankless"


def register() -> None:
    """Register the load format and the backend for weight transfers with vLLM. It may be called several times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: PLC0415 - inside of vLLM
    from vllm.model_executor import model_loader  # noqa: PLC0415

    from rankless.vllm.model_loader import RanklessVllmLoader  # noqa: PLC0415

    # A second registration would be reported as a conflict.
    if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not RanklessVllmLoader:  # noqa: SLF001
        model_loader.register_model_loader(LOAD_FORMAT)(RanklessVllmLoader)
    if LOAD_FORMAT not in WeightTransferEngineFactory._registry:  # noqa: SLF001
        WeightTransferEngineFactory.register_engine(
            LOAD_FORMAT, "rankless.vllm.weight_transfer", "RanklessWeightTransfer"
        )
