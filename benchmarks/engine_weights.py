"""``python -m benchmarks.engine_weights``: what loaders of vLLM read, and the processor time they take, side by side.

Each rank is a process with vLLM's own model of a Llama of 0.57 GB. Each loader loads it several times, in turn, from a
cold page cache or from an object store on this machine. ``make bench-engines`` installs vLLM first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.object_server import ObjectServer
from benchmarks.request_process import ROOT
from campaigns.common.case_runner import format_table
from campaigns.common.reserved_port import reserve_port

#: The sizes of the model: hidden, intermediate, layers, vocabulary.
_HIDDEN, _INTERMEDIATE, _LAYERS, _VOCABULARY = 2048, 5504, 5, 16000

DEFAULT, RUNAI, OURS = "vLLM's own", "runai_streamer", "rankless"

#: Reads all bytes of the files, and does nothing else: what one rank needs at least.
BARE = "bare loop of preads"

#: The bytes of each read of the bare loop, and its threads: those of rankless.
_PIECE, _THREADS = 16 * 2**20, 4

_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
}


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_weights", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="tensor-parallel ranks (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="loads of each loader, after one more (default: 3)")
    parser.add_argument("--store", action="store_true", help="from an object store instead of the disk")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _run_rank(json.loads(options.rank))
        return 0
    with tempfile.TemporaryDirectory(prefix="rankless-", dir=ROOT) as work:
        model = _write_model(Path(work) / "model")
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        with _serve(Path(work), model) if options.store else _on_disk(model) as (source, environment):
            rows = [
                (name, *_measure(name, _Job(model, source, environment, size), options.ranks, options.rounds))
                for name in _choose_loaders(options)
            ]
    head = (f"ranks: {options.ranks}", "read from the disk, of the file", "processor, s per GB of the file", "time, s")
    print(format_table(head, rows))
    return 0


def _choose_loaders(options: argparse.Namespace) -> tuple[str, ...]:
    if options.store:
        return RUNAI, OURS
    return (BARE, DEFAULT, RUNAI, OURS) if options.ranks == 1 else (DEFAULT, RUNAI, OURS)


def _write_model(folder: Path) -> Path:
    import torch  # noqa: PLC0415 - as vLLM, which only the ranks import
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import LlamaConfig  # noqa: PLC0415

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=_HIDDEN,
        intermediate_size=_INTERMEDIATE,
        num_hidden_layers=_LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=_VOCABULARY,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    shapes = {"q_proj": (_HIDDEN, _HIDDEN), "k_proj": (_HIDDEN // 4, _HIDDEN), "v_proj": (_HIDDEN // 4, _HIDDEN)}
    attention = {f"self_attn.{name}.weight": shape for name, shape in {**shapes, "o_proj": (_HIDDEN, _HIDDEN)}.items()}
    layer = {
        **attention,
        "mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        "input_layernorm.weight": (_HIDDEN,),
        "post_attention_layernorm.weight": (_HIDDEN,),
    }
    embeddings = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (_VOCABULARY, _HIDDEN))
    parts = [{f"model.layers.{n}.{name}": shape for name, shape in layer.items()} for n in range(_LAYERS)]
    parts.append({**embeddings, "model.norm.weight": (_HIDDEN,)})
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        save_file({key: torch.rand(shape).bfloat16() for key, shape in part.items()}, folder / name, {"format": "pt"})
    index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    os.sync()
    return folder


@contextmanager
def _on_disk(model: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield str(model), {}


@contextmanager
def _serve(work: Path, model: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Put the model into an object store, for use inside the ``with`` block."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with ObjectServer(work) as server:
        url = server.plain.url
        for file in model.iterdir():
            body = file.read_bytes()
            request = urllib.request.Request(f"{url}/bucket/model/{file.name}", body, method="PUT")  # noqa: S310
            opener.open(request).close()
        yield "s3://bucket/model", {"AWS_ENDPOINT_URL": url, "RUNAI_STREAMER_S3_ENDPOINT": url}


@dataclass(frozen=True)
class _Job:
    """The model, where it is loaded from, the environment for that, and the size of its files in bytes."""

    model: Path
    source: str
    environment: Mapping[str, str]
    size: int


def _measure(loader: str, job: _Job, ranks: int, rounds: int) -> tuple[str, ...]:
    """Return the medians of the sums of all ranks: bytes from the disk and processor time; and of the time."""
    with reserve_port() as port:
        common = {"size": ranks, "port": port, "loader": loader, "rounds": rounds + 1}
        commands = [{"rank": rank, "model": str(job.model), "source": job.source, **common} for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine_weights", "--rank", json.dumps(command)],
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT, **job.environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for command in commands
        ]
        outputs = [process.communicate()[0] for process in processes]
    of_ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    measured = list(zip(*of_ranks, strict=True))[1:]  # the first round also imports
    disk = statistics.median(sum(rank[0] for rank in results) for results in measured) / job.size
    processor = statistics.median(sum(rank[1] for rank in results) for results in measured) / (job.size / 1e9)
    seconds = statistics.median(max(rank[2] for rank in results) for results in measured)
    return f"{disk:.2f}", f"{processor:.2f}", f"{seconds:.2f}"


def _run_rank(command: dict[str, Any]) -> None:
    """Load as one rank, and print the bytes from the disk, the processor time and the time of each round."""
    rank, size = command["rank"], command["size"]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(command["port"])}
    os.environ["VLLM_DIST_IDENT"] = f"rankless-{command['port']}"
    import torch  # noqa: PLC0415 - the environment comes first
    import torch.distributed as dist  # noqa: PLC0415
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.distributed import parallel_state  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415
    from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

    config = EngineArgs(
        model=command["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        dtype="bfloat16",
        tensor_parallel_size=size,
        distributed_executor_backend="external_launcher" if size > 1 else None,
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        parallel_state.init_distributed_environment(size, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(size, 1)
        model = initialize_model(config)
        results = []
        for _ in range(command["rounds"]):
            if rank == 0:
                _drop_from_cache(Path(command["model"]))
            dist.barrier()
            disk, processor, start = _count_disk_bytes(), time.process_time(), time.perf_counter()
            _LOADERS[command["loader"]](model, command["source"])
            results.append((_count_disk_bytes() - disk, time.process_time() - processor, time.perf_counter() - start))
            dist.barrier()
    print(json.dumps(results), flush=True)
    os._exit(0)


#: The memory that the bare loop reads into: touched by its first round, as parameters are.
_memory: dict[str, memoryview] = {}


def _read_bare(model: Any, source: str) -> None:
    del model
    with ThreadPoolExecutor(_THREADS) as pool, ExitStack() as files:
        for path in sorted(Path(source).glob("*.safetensors")):
            file = files.enter_context(path.open("rb", buffering=0))
            target = _memory.setdefault(str(path), memoryview(bytearray(path.stat().st_size)))
            for begin in range(0, len(target), _PIECE):
                pool.submit(os.preadv, file.fileno(), [target[begin : begin + _PIECE]], begin)
        pool.shutdown()


def _load_as_vllm(model: Any, source: str) -> None:
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator  # noqa: PLC0415

    files = sorted(map(str, Path(source).glob("*.safetensors")))
    model.load_weights(safetensors_weights_iterator(files, use_tqdm_on_load=False))


def _load_as_runai(model: Any, source: str) -> None:
    from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

    with SafetensorsStreamer() as streamer:
        for number in range(1, _LAYERS + 2):
            streamer.stream_file(f"{source}/model-{number:05}-of-{_LAYERS + 1:05}.safetensors")
            model.load_weights(iter(list(streamer.get_tensors())))


def _load_as_rankless(model: Any, source: str) -> None:
    from vllm.distributed import get_world_group  # noqa: PLC0415

    import rankless  # noqa: PLC0415

    with rankless.open_weights(source, process_group=get_world_group().cpu_group) as weights:
        model.load_weights(weights)


_LOADERS: Mapping[str, Callable[[Any, str], None]] = {
    BARE: _read_bare,
    DEFAULT: _load_as_vllm,
    RUNAI: _load_as_runai,
    OURS: _load_as_rankless,
}


def _drop_from_cache(model: Path) -> None:
    for file in model.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _count_disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


if __name__ == "__main__":
    sys.exit(main())
