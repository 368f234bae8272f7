"""A vLLM of its own process that reloads weights in place: prints tokens before and after. Run by ``test_vllm.py``."""

from __future__ import annotations

import json
import sys
from typing import Any

import rankless


def main(options: dict[str, Any], reloads: list[dict[str, Any]], saved: str) -> None:
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    engine = LLM(
        skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=2, dtype="float16", **options
    )

    def show_tokens() -> None:
        engine.reset_prefix_cache()
        parameters = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
        (request,) = engine.generate([{"prompt_token_ids": [1, 2, 3, 4]}], parameters, use_tqdm=False)
        print("TOKENS", json.dumps(list(request.outputs[0].token_ids)))

    show_tokens()
    if saved:  # meanwhile a training has saved one more checkpoint
        run, _, file = saved.partition(" ")
        rankless.save_checkpoint(run, "step_3", load_file(file), rng=False)
    for kwargs in reloads:
        try:
            engine.collective_rpc("reload_weights", kwargs=kwargs)
        except (rankless.NoCheckpointError, rankless.MismatchError) as error:  # then it serves what it had
            print("ERROR", error)
        show_tokens()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
