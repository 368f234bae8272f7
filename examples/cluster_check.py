"""Check rankless on a real cluster, and print a report to paste into an issue: in minutes, and at most in an hour.

    srun --ntasks-per-node=8 --gpus-per-node=8 python cluster_check.py /shared/check        # under Slurm
    torchrun --nnodes 2 --nproc-per-node 8 ... cluster_check.py /shared/check               # elsewhere

The directory must be on the storage to check, exist, and be empty. All ranks save a model of FSDP2 with AdamW
(``--gigabytes`` a rank), load it, and compare every value; torch.distributed.checkpoint (DCP) saves and loads the same.
Then all ranks kill themselves in the middle of a save.
Start the same command again: it resumes, compares, and prints the report.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankless

#: The step of the checkpoint that both starts compare, and the one in whose save the first start dies.
WHOLE, INTERRUPTED = 3, 4

#: The seconds of each measured call on the slowest rank, by name.
Seconds = dict[str, float]


def main() -> None:
    """Run the first or the second start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="state of each rank (default: 1)")
    options = parser.parse_args()
    device = start_ranks()
    model, optimizer = build_training(options.gigabytes, device)
    run = options.directory / "run"
    is_second_start = run.exists()
    require_agreement(is_second_start)
    (finish if is_second_start else measure)(run, model, optimizer)
    dist.destroy_process_group()


def start_ranks() -> str:
    """Make the process group, from the variables of torchrun or of srun. Return the kind of device."""
    for name, of_slurm, single in (
        ("RANK", "SLURM_PROCID", "0"),
        ("LOCAL_RANK", "SLURM_LOCALID", "0"),
        ("WORLD_SIZE", "SLURM_NTASKS", "1"),
        ("MASTER_PORT", "", "29511"),
    ):
        os.environ.setdefault(name, os.environ.get(of_slurm, single))
    os.environ.setdefault("MASTER_ADDR", first_host(os.environ.get("SLURM_JOB_NODELIST", "127.0.0.1")))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return "cuda"
    dist.init_process_group("gloo")
    return "cpu"


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it, such as ``node[03-07,9],other``."""
    prefix, bracket, numbers = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.split(",", maxsplit=1)[0]
    return prefix + numbers.split("]")[0].split(",")[0].split("-")[0]


def build_training(gigabytes: float, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its AdamW after one step: twelve bytes for each parameter, sharded over all ranks."""
    width, layers = 2048, 16
    rows = max(8, int(gigabytes * 1e9 * dist.get_world_size() / 12 / width / layers))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, rows, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def list_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return this rank's shards of the parameters and their moments."""
    states: list[dict[str, Any]] = [optimizer.state[parameter] for parameter in model.parameters()]
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
    return [tensor.to_local().detach() for tensor in (*model.parameters(), *moments)]


def set_values(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give all shards the values of a step: drawn on each rank by its number and the step."""
    for number, shard in enumerate(list_shards(model, optimizer)):
        generator = torch.Generator(shard.device).manual_seed(10**6 * step + 10**3 * number + dist.get_rank())
        shard.uniform_(generator=generator)


def has_values(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> bool:
    """Return whether all shards have the values of a step. Then they have them in any case."""
    actual = [shard.clone() for shard in list_shards(model, optimizer)]
    set_values(model, optimizer, step)
    return all(map(torch.equal, actual, list_shards(model, optimizer)))


def require_agreement(is_second_start: bool) -> None:
    """Raise an error unless all ranks see the same directory."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, is_second_start)
    require(len(set(values)) == 1, f"the ranks do not see the same directory: {values}")


def measure(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save, load and compare; note the seconds in the directory; then die in the middle of a save."""
    seconds: Seconds = {}
    save = rankless.save_checkpoint
    for step, name in enumerate(("first save", "second save")):
        set_values(model, optimizer, step)
        clock(seconds, name, partial(save, run, f"{step}", model, optimizer, step=step))
    measure_dcp(run.parent / "dcp", model, optimizer, seconds)
    for name, step in (("first", WHOLE - 1), ("second", WHOLE)):
        set_values(model, optimizer, step)
        begin = partial(save, run, f"{step}", model, optimizer, step=step, async_save=True)
        handle = clock(seconds, f"{name} asynchronous save, the call", begin)
        clock(seconds, f"{name} asynchronous save, the rest", handle.wait)
    set_values(model, optimizer, step=9)
    clock(seconds, "load, every byte verified", lambda: rankless.load_checkpoint(run, model=model, optimizer=optimizer))
    require(has_values(model, optimizer, WHOLE), "the load has other values than the save")
    if dist.get_rank() == 0:
        lines = [f"{name}: {value:.3f} s" for name, value in seconds.items()]
        (run.parent / "seconds.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(*lines, "all ranks end by SIGKILL in a save now: start the same command again", sep="\n", flush=True)
    dist.barrier()
    set_values(model, optimizer, INTERRUPTED)
    threading.Timer(0.5 * seconds["second save"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    save(run, f"{INTERRUPTED}", model, optimizer, step=INTERRUPTED)
    time.sleep(60)  # a save that was faster: the end comes now


def measure_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, seconds: Seconds) -> None:
    """Save and load the same with torch.distributed.checkpoint, for comparison, and remove its files."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    for name in ("first", "second"):
        clock(seconds, f"DCP, {name} save", partial(dcp_save, state, checkpoint_id=folder / name))
    clock(seconds, "DCP, load", partial(dcp_load, state, checkpoint_id=folder / name))
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def finish(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Resume after the crash, compare, save once more, and print the report."""
    loaded = rankless.restore(run, model=model, optimizer=optimizer)
    step = int(loaded.step or 0)
    require(step in {WHOLE, INTERRUPTED}, f"the job resumed from step {step}")
    require(has_values(model, optimizer, step), f"step {step} has other values after the crash")
    rankless.save_checkpoint(run, "after_the_crash", model, optimizer, step=step + 1)
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if dist.get_rank() == 0:
        print(build_report(run, step, len(set(hosts))), flush=True)


def build_report(run: Path, step: int, hosts: int) -> str:
    """Return the report."""
    problems = [str(part) for part in rankless.open(run).verify() if part.problem is not None]
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    left = [path.name for path in run.iterdir() if "partial" in path.name]
    return "\n".join(
        [
            "----- report of examples/cluster_check.py -----",
            f"versions: rankless {rankless.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
            f"{dist.get_world_size()} ranks on {hosts} hosts, accelerator: {accelerator}",
            f"kernel {platform.release()}, file system {find_file_system(run)}",
            f"checkpoint: {max(info.nbytes for info in rankless.list_checkpoints(run)):,} bytes",
            (run.parent / "seconds.txt").read_text(encoding="utf-8").strip(),
            f"resumed after SIGKILL of all ranks in a save: step {step}, all values equal",
            f"left of the interrupted save: {left or 'nothing'}",
            f"corrupt: {problems or 'nothing'}",
            "----- end -----",
        ]
    )


def find_file_system(path: Path) -> str:
    """Return the type of the file system of a path."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    above = [(len(where), kind) for _, where, kind in mounts if path.resolve().is_relative_to(where)]
    return max(above)[1]


def clock(seconds: Seconds, name: str, call: Callable[[], Any]) -> Any:
    """Call a function on all ranks, and note the seconds of the slowest. Return its result."""
    dist.barrier()
    started = time.perf_counter()
    result = call()
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, time.perf_counter() - started)
    seconds[name] = max(values)
    return result


def require(condition: bool, problem: str) -> None:
    """Raise an error if a condition does not hold."""
    if not condition:
        raise RuntimeError(f"rank {dist.get_rank()}: {problem}")


if __name__ == "__main__":
    main()
