"""The HTTP server of vLLM with the load format of rankless, from its start over a reload to its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import rankless
from campaigns.common.reserved_port import reserve_port
from tests.helpers.vllm_programs import ENVIRONMENT, generate, tokens_of

pytest.importorskip("vllm")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as the Hub has it, with a tokenizer, which the server needs."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from campaigns.engines.tiny_models import write_model

    folder = write_model("llama", tmp_path)
    words = models.WordLevel({f"w{number}": number for number in range(250)}, unk_token="w0")  # noqa: S106 - a word
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w2")  # noqa: S106 - a word
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serve(model: Path, log: Path, **options: Any) -> Iterator[str]:
    """Yield the URL of a server, which ends with status 0 when the block ends."""
    with reserve_port() as port, log.open("wb") as output:
        arguments = {"model": model, "load-format": "rankless", "dtype": "float16", "max-model-len": 64, "port": port}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        for name, value in {**arguments, **options}.items():
            command += [f"--{name}", str(value)]
        env = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}  # it has the reload
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            status = process.wait(60)
    assert status == 0


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        with suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/health", timeout=5)  # noqa: S310 - of this host
            return
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(1)
    raise TimeoutError(log.read_text()[-3000:])


def post(url: str, body: dict[str, Any]) -> Any:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - of this host
    text = urllib.request.urlopen(request, timeout=60).read()  # noqa: S310
    return json.loads(text) if text else None


def tokens_from(url: str, model: Path) -> list[int]:
    body = {"model": str(model), "prompt": [1, 2, 3, 4], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    tokens: list[int] = post(f"{url}/v1/completions", body)["choices"][0]["token_ids"]
    return tokens


def test_a_server_answers_from_a_run_and_reloads_its_newest_checkpoint(model: Path, tmp_path: Path) -> None:
    stored = load_file(model / "model.safetensors")
    changed = {name: tensor.flip(0) for name, tensor in stored.items()}
    run, log = tmp_path / "run", tmp_path / "log"
    rankless.save_checkpoint(run, "step_1", stored, rng=False)
    with serve(model, log, **{"model-loader-extra-config": json.dumps({"path": str(run)})}) as url:
        assert tokens_from(url, model) == tokens_of(generate(model))
        rankless.save_checkpoint(run, "step_2", changed, rng=False)
        post(f"{url}/collective_rpc", {"method": "reload_weights"})
        post(f"{url}/reset_prefix_cache", {})
        after = tokens_from(url, model)
    save_file(changed, model / "model.safetensors")
    assert after == tokens_of(generate(model))
    assert log.read_text().count("; verified; ") == 2
