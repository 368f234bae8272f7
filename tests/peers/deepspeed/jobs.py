"""What the ranks of a job do: ``torchrun -m tests.peers.deepspeed.jobs RUNS.json``. Each run has its own engine."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rankless.deepspeed import load_checkpoint, save_checkpoint
from rankless.errors import RanklessError
from tests.peers.deepspeed.engines import full_state, make_engine, plain_values, train


class Counter:
    def state_dict(self) -> dict[str, int]:
        return {"count": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError(f"no checkpoint has a counter; got {state}")


def run(spec: dict[str, Any]) -> None:
    """Create an engine, load, train, save, and write down losses, values and the whole state at each point."""
    options = dict(spec.get("options", {}))
    if spec.get("universal"):
        config = {"checkpoint": {"load_universal": True}}
        options["config"] = {**options.get("config", {}), **config}
    engine = make_engine(spec["stage"], spec.get("dtype", "fp32"), seed=spec.get("seed", 0), **options)
    record: dict[str, Any] = {}
    out = Path(spec["out"])
    if "load" in spec:
        path, client = engine.load_checkpoint(spec["load"])
        assert path is not None
        record["client_state"] = {key: client[key] for key in spec.get("client_state", {})}
        note(engine, record, out, "loaded")
    if "rankless_load" in spec:
        with warnings.catch_warnings(record=True) as caught:
            stateful = {"counter": Counter()} if spec.get("load_counter") else None
            path, client = load_checkpoint(
                engine, spec["rankless_load"], stateful=stateful, **spec.get("load_options", {})
            )
        record["client_state"] = client
        record["warnings"] = [str(item.message) for item in caught if "not all that was asked for" in str(item.message)]
        note(engine, record, out, "loaded")
    saves = []
    for number, steps in enumerate(spec.get("steps", [])):
        record.setdefault("losses", []).extend(train(engine, range(*steps)))
        note(engine, record, out, f"trained{number}")
        if number < len(spec.get("saves", [])):
            engine.save_checkpoint(spec["saves"][number], client_state=spec.get("client_state", {}))
        if number < len(spec.get("rankless_saves", [])):
            saves.append(start_save(engine, spec, spec["rankless_saves"][number]))
    for save in saves:
        save.wait()
    if "refused_save" in spec:
        record["refused"] = is_refused(engine, spec)
    if dist.get_rank() == 0:
        out.with_suffix(".json").write_text(json.dumps(record))
    engine.destroy()


def start_save(engine: Any, spec: dict[str, Any], path: str) -> Any:
    """Save with rankless, and return the handle. Only a save in the background goes on."""
    options = {"client_state": spec.get("client_state", {}), **spec.get("save_options", {})}
    handle = save_checkpoint(engine, path, **options)
    if not options.get("async_save"):
        handle.wait()
    return handle


def is_refused(engine: Any, spec: dict[str, Any]) -> bool:
    """Return whether a save raises the error on this rank. Only the first rank changes a weight."""
    if "change_weight" in spec and dist.get_rank() == 0:
        engine.module.get_parameter(spec["change_weight"]).data.add_(1)
    kind, message = spec["save_error"]
    try:
        saved = engine.module if spec.get("pass_module") else engine
        options = {"client_state": spec.get("client_state", {}), **spec.get("save_options", {})}
        save_checkpoint(saved, spec["refused_save"], **options)
    except RanklessError as error:
        return type(error).__name__ == kind and message in str(error)
    return False


def note(engine: Any, record: dict[str, Any], out: Path, point: str) -> None:
    record[point] = plain_values(engine)
    state = full_state(engine)
    if dist.get_rank() == 0:
        save_file(state, f"{out}.{point}.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    deepspeed.init_distributed("gloo")
    for spec in json.loads(Path(sys.argv[1]).read_text()):
        run(spec)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
