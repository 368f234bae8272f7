"""A vLLM of its own process that follows published weights, and prints tokens. Run by ``test_vllm_follow.py``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import rankless


def main(options: dict[str, Any], weights: str, folders: list[str], fails: dict[str, int], removed: int) -> None:
    """Publish the model of each folder, and let the engine follow it.

    ``fails``: which update fails on which worker. ``removed``: in which update the files of the version are removed
    between its preparation and its commit.
    """
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    from rankless.vllm.following import EngineFollower

    engine = LLM(
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        dtype="float16",
        weight_transfer_config=WeightTransferConfig(backend="rankless"),
        worker_extension_cls="tests.engines.failing_worker.FailingWorker",
        **options,
    )

    def show_tokens() -> None:
        parameters = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
        (request,) = engine.generate([{"prompt_token_ids": [1, 2, 3, 4]}], parameters, use_tqdm=False)
        print("TOKENS", json.dumps(list(request.outputs[0].token_ids)), flush=True)

    show_tokens()
    publisher = rankless.WeightPublisher(weights, process_group="self", async_save=False)
    follower = EngineFollower(engine, weights)
    for number, folder in enumerate(folders):
        publisher.publish(load_file(Path(folder) / "model.safetensors"), step=number)
        if str(number) in fails:
            engine.collective_rpc("fail_next", args=(fails[str(number)],))
            try:
                follower.update()
            except rankless.StateError as error:
                print("ERROR", error, flush=True)
            show_tokens()
        if number == removed:
            engine.collective_rpc("remove_next")
        began = time.perf_counter()
        print("VERSION", follower.update(), follower.paused_seconds, time.perf_counter() - began, flush=True)
        show_tokens()
    print("VERSION", follower.update(), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
