"""A vLLM of its own process: loads a model, and prints the tokens that it generates. Run by ``test_vllm.py``."""

from __future__ import annotations

import json
import sys
from typing import Any


def main(options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        dtype="float16",  # of others vLLM's kernels may use instructions that a virtual machine lacks
        **options,
    )
    parameters = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    prompt = {"prompt_token_ids": [1, 2, 3, 4]}
    (request,) = engine.generate([prompt], parameters, use_tqdm=False)
    print("TOKENS", json.dumps(list(request.outputs[0].token_ids)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
