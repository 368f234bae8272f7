"""Programs that ``test_sglang.py`` runs in processes of their own: ``python -m`` PROGRAM OPTIONS."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import tests.engines.torchvision_for_cpus  # noqa: F401 - SGLang's processes import this module again, before SGLang


def generate(options: dict[str, Any]) -> None:
    """Start an engine, and print the tokens that it generates; load ``then`` in place, and print them again."""
    import sglang

    then = options.pop("then", None)
    engine = sglang.Engine(
        device="cpu",
        skip_tokenizer_init=True,
        mem_fraction_static=0.05,
        max_total_tokens=256,
        context_length=128,
        max_running_requests=2,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        skip_server_warmup=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        log_level="info",
        **options,
    )
    for folder in (None, *([then] if then else [])):
        if folder is not None:
            print("UPDATED", json.dumps(engine.update_weights_from_disk(folder)[:2]))
        result = engine.generate(input_ids=[1, 5, 9], sampling_params={"max_new_tokens": 8, "temperature": 0})
        print("TOKENS", json.dumps(result["output_ids"]))
    engine.shutdown()


def compare(options: dict[str, Any]) -> None:
    """Load a model in the ranks of a layout, with SGLang's own loader and with rankless, and print what differs."""
    import torch.multiprocessing

    size = options["tp_size"]
    torch.multiprocessing.spawn(_compare_on_rank, (options["model_path"], size, options["port"]), nprocs=size)


def _compare_on_rank(rank: int, folder: str, size: int, port: int) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.bootstrap import init_parallel_runtime
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=folder, device="cpu", tp_size=size, skip_tokenizer_init=True)
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    initialize_moe_config()
    init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    config = ModelConfig.from_server_args(arguments)
    states = []
    for load_format in ("auto", "rankless"):
        loader = get_model_loader(LoadConfig(load_format=load_format), config)
        model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        states.append({**dict(model.named_parameters()), **dict(model.named_buffers())})
    own, ours = states
    different = sorted(own.keys() ^ ours.keys()) + [name for name in own if not torch.equal(own[name], ours[name])]
    print(f"RANK {rank}: {type(loader).__name__}, {len(own)} tensors, different: {different}", flush=True)


if __name__ == "__main__":
    {"generate": generate, "compare": compare}[sys.argv[1]](json.loads(sys.argv[2]))
