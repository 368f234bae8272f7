"""Programs that start a real vLLM in a process of its own, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

#: One thread for each worker: vLLM wants a NUMA node for each, unless it binds none.
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_AOT_COMPILE": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def generate(model: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    in_one_process = options.get("tensor_parallel_size", 1) == 1
    return run("generate", json.dumps({"model": str(model), **options}), in_one_process=in_one_process)


def run(script: str, argument: str, *, in_one_process: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"tests.engines.{script}", argument],
        env={**os.environ, **ENVIRONMENT, **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_one_process else {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def tokens_of(result: subprocess.CompletedProcess[str]) -> list[int]:
    (tokens,) = lists_of(result)
    return tokens


def lists_of(result: subprocess.CompletedProcess[str]) -> list[list[int]]:
    lines = [line.removeprefix("TOKENS ") for line in result.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, result.stdout[-3000:] + result.stderr[-3000:]
    return [json.loads(line) for line in lines]
