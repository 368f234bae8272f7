"""``python -m benchmarks.published_pause MODEL``: for how long a vLLM that follows published weights does not generate.

``MODEL`` is a folder that vLLM opens. In each round a hundredth of the elements change and are published. It prints the
medians of: the pause, the whole update, vLLM's ``reload_weights`` of the same files in memory, and the bare reload of
tensors that are in the memory of each worker: no update with vLLM's layerwise reload can be faster.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rankless.vllm.weight_transfer import FollowingWorker

#: Rounds that are not counted: the first ones touch new memory.
_WARM_UP = 2


class BareWorker(FollowingWorker):
    """A worker that can also reload tensors from its memory. vLLM makes it."""

    model_runner: Any

    def bare_reload(self, folder: str) -> float:
        """Return for how many seconds vLLM reloads the tensors of a folder that are in memory."""
        from safetensors.torch import load_file  # noqa: PLC0415 - the workers alone need it

        tensors = {name: tensor.clone() for name, tensor in load_file(f"{folder}/model.safetensors").items()}
        began = time.perf_counter()
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        return time.perf_counter() - began


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tp", type=int, default=1, help="the ranks of tensor parallelism (default: 1)")
    parser.add_argument("--rounds", type=int, default=8, help="(default: 8)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        seconds = _measure(options.model, options.tp, options.rounds + _WARM_UP, Path(scratch))
    for name, values in seconds.items():
        print(f"{name:40} {statistics.median(values[_WARM_UP:]):.3f} s", flush=True)


def _measure(model: Path, tp: int, rounds: int, scratch: Path) -> dict[str, list[float]]:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - slow to import, as below
    from vllm import LLM  # noqa: PLC0415
    from vllm.config import WeightTransferConfig  # noqa: PLC0415

    import rankless  # noqa: PLC0415
    from rankless.vllm.following import EngineFollower  # noqa: PLC0415

    engine = LLM(
        str(model),
        load_format="rankless",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        dtype="float16",
        tensor_parallel_size=tp,
        weight_transfer_config=WeightTransferConfig(backend="rankless"),
        worker_extension_cls="benchmarks.published_pause.BareWorker",
    )
    copy = Path(shutil.copytree(model, scratch / "copy"))
    tensors = load_file(copy / "model.safetensors")
    publisher = rankless.WeightPublisher(scratch / "weights", process_group="self", async_save=False)
    follower = EngineFollower(engine, str(scratch / "weights"))
    names = ("pause", "update", "reload_weights", "bare reload from memory")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for step in range(rounds):
        for tensor in tensors.values():
            tensor[..., step::100] *= 1.01
        publisher.publish(tensors, step=step)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        began = time.perf_counter()
        follower.update()
        updated = time.perf_counter()
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(copy)})
        reloaded = time.perf_counter()
        bare = max(engine.collective_rpc("bare_reload", args=(str(copy),)))
        for name, value in zip(
            names, (follower.paused_seconds, updated - began, reloaded - updated, bare), strict=True
        ):
            seconds[name].append(value)
    return seconds


if __name__ == "__main__":
    main()
