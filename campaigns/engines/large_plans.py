"""``python -m campaigns.engines.large_plans``: ``rankless show --for vllm`` of models that are larger than memory.

Their files have true headers, and holes instead of tensors. The command must need no memory for weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

#: The files of a folder are of this size.
_FILE_BYTES = 5 * 10**9

#: The class of the configuration of each model, and what differs from its defaults.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3-70B": (
        "LlamaConfig",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
            "architectures": ["LlamaForCausalLM"],
        },
    ),
    "Qwen3-235B-A22B": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": False,
            "mlp_only_layers": [],
            "architectures": ["Qwen3MoeForCausalLM"],
        },
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "architectures": ["DeepseekV3ForCausalLM"]},
    ),
}


def main() -> int:
    """Print the table of each model, with the time and the memory that the command took."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.engines.large_plans", description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be given several times")
    parser.add_argument("--layout", default="--tp 8", help="options of the command (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rankless-") as root:
        for name in options.model or MODELS:
            folder = write_folder(Path(root) / name, make_config(name))
            command = ["show", str(folder), "--for", "vllm", *options.layout.split()]
            started = time.monotonic()
            subprocess.run([sys.executable, "-m", "rankless", *command], stderr=subprocess.DEVNULL, check=True)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            print(f"{time.monotonic() - started:.0f} s, {peak / 1e6:.2f} GB of memory at most so far", flush=True)
    return 0


def make_config(name: str) -> transformers.PreTrainedConfig:
    """Return the configuration of a model."""
    kind, options = MODELS[name]
    config: transformers.PreTrainedConfig = getattr(transformers, kind)(**options)
    return config


def write_folder(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    """Write a folder as the Hub has it, whose tensors are holes in its files. Return it."""
    folder.mkdir()
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    parts: list[dict[str, list[int]]] = [{}]
    size = 0
    for name, shape in _stored_shapes(config):
        nbytes = 2 * math.prod(shape)
        if parts[-1] and size + nbytes > _FILE_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = shape
        size += nbytes
    files = {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, start=1)}
    for file, part in files.items():
        _write_holes(folder / file, part)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _write_holes(file: Path, shapes: dict[str, list[int]]) -> None:
    header, size = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, size + nbytes]}
        size += nbytes
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(file, 8 + len(raw) + size)


def _stored_shapes(config: transformers.PreTrainedConfig) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and the shape of each tensor, with experts apart, as the Hub stores them."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        module, _, last = name.rpartition(".")
        if not module.endswith(".experts"):
            yield name, list(tensor.shape)
            continue
        count, rows, columns = tensor.shape
        divided = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
        for expert in range(count):
            for part in divided:
                yield f"{module}.{expert}.{part}.weight", [rows // len(divided), columns]


if __name__ == "__main__":
    sys.exit(main())
