"""The plugin that vLLM calls in each of its processes: the entry point ``vllm.general_plugins``.

It must be quick and import no model: each process of vLLM calls it.
"""

from __future__ import annotations

#: The name of the load format.
LOAD_FORMAT = "rankless"


def register() -> None:
    """Register the load format ``rankless`` with vLLM. It may be called several times."""
    from vllm.model_executor import model_loader  # noqa: PLC0415 - inside of vLLM only

    from rankless.vllm.model_loader import RanklessVllmLoader  # noqa: PLC0415

    # A second registration would be reported as a conflict.
    if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not RanklessVllmLoader:  # noqa: SLF001
        model_loader.register_model_loader(LOAD_FORMAT)(RanklessVllmLoader)
