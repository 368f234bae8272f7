"""An ``AsyncLLM`` that generates all the time while it follows published weights. Run by ``test_vllm_follow.py``."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import rankless


async def _follow(options: dict[str, Any], weights: str, folders: list[str]) -> None:
    from safetensors.torch import load_file
    from vllm import SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from rankless.vllm.following import AsyncEngineFollower

    arguments = AsyncEngineArgs(
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        dtype="float16",
        weight_transfer_config=WeightTransferConfig(backend="rankless"),
        worker_extension_cls="rankless.vllm.weight_transfer.FollowingWorker",
        **options,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    parameters = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    stop, count = threading.Event(), 0

    async def generate(number: str) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate({"prompt_token_ids": [1, 2, 3, 4]}, parameters, number):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def keep_busy() -> None:
        nonlocal count
        while not stop.is_set():
            await generate(f"busy-{count}")
            count += 1

    busy = asyncio.create_task(keep_busy())
    publisher = rankless.WeightPublisher(weights, process_group="self", async_save=False, anchor_every=20, keep=None)
    follower = AsyncEngineFollower(engine, weights)
    for number, folder in enumerate(folders):
        publisher.publish(load_file(Path(folder) / "model.safetensors"), step=number)
        before = count
        version = await follower.update()
        print("VERSION", version, f"{follower.paused_seconds:.3f}", count - before, flush=True)
        print("TOKENS", json.dumps(await generate(f"after-{number}")), flush=True)
    stop.set()
    await busy
    print("BUSY", count, await engine.get_weight_version(), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(_follow(*json.loads(sys.argv[1])))
