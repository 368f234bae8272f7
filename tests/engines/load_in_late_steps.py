"""A vLLM of its own process that loads again layer by layer, as it does for weights that it quantizes itself.

It packs weights for its kernels while the block of ``open_weights`` is open. Prints whether the tokens are those of
before. Run by ``test_vllm.py``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import rankless


def main(folder: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    engine = LLM(
        folder, load_format="rankless", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="float16"
    )

    def generate() -> list[int]:
        engine.reset_prefix_cache()
        parameters = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
        (request,) = engine.generate([{"prompt_token_ids": [1, 2, 3, 4]}], parameters, use_tqdm=False)
        return list(request.outputs[0].token_ids)

    def clear(model: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

    def load(model: Any) -> None:
        with rankless.open_weights(folder, process_group="self") as weights:
            initialize_layerwise_reload(model)
            model.load_weights(weights)
            finalize_layerwise_reload(model, engine.llm_engine.vllm_config.model_config)

    before = generate()
    engine.apply_model(clear)
    assert generate() != before
    engine.apply_model(load)
    print("EQUAL", generate() == before)


if __name__ == "__main__":
    main(sys.argv[1])
