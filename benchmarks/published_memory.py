"""``torchrun -m benchmarks.published_memory``: what a publication takes on each rank, above the memory of the model.

Each rank of an FSDP2 model has a share, of which a part changes before each version. The share is counted in the dtype
that is published. It prints the peak in a publication, and what stays until the next one: the median over the versions
of the rank with the most.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import rankless

#: The layers, and their width: 512 MiB of parameters in bf16.
_LAYERS, _WIDTH = 64, 2048

#: Versions that are not counted: the first is an anchor, and touches new memory.
_WARM_UP, _VERSIONS = 2, 6


class _Layers(nn.ModuleList):
    def forward(self) -> None:
        """Do nothing: only the parameters are needed."""


def main() -> None:
    """Measure synchronous and asynchronous publications, and print what rank 0 has gathered."""
    dist.init_process_group("gloo")
    model = _Layers(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))
    fully_shard(model)
    share = _LAYERS * _WIDTH**2 * 2 / dist.get_world_size() / 2**20
    for async_save in (False, True):
        measured = _measure(model, async_save=async_save)
        gathered: list[tuple[float, float]] = [measured] * dist.get_world_size()
        dist.all_gather_object(gathered, measured)
        if dist.get_rank() == 0:
            peak, kept = map(max, zip(*gathered, strict=True))
            print(f"{async_save=}: share {share:.0f} MiB, peak {peak:.0f} MiB, kept {kept:.0f} MiB", flush=True)
    dist.destroy_process_group()


def _measure(model: nn.Module, *, async_save: bool) -> tuple[float, float]:
    """Return the peak and what is kept, in MiB, of this rank."""
    folders = [tempfile.mkdtemp(dir="/dev/shm") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    with rankless.WeightPublisher(folder / "small", async_save=async_save) as publisher:
        publisher.publish({"first": torch.zeros(3)})  # what is imported is not memory of a version
    base, peaks, kept = _status("VmRSS"), list[float](), list[float]()
    with rankless.WeightPublisher(folder / "weights", dtype="bfloat16", async_save=async_save, keep=1) as publisher:
        for step in range(_WARM_UP + _VERSIONS):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local()[step % 5 :: 37] *= 1.01
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            publisher.publish(model, step=step)
            publisher.wait()
            peaks.append(_status("VmHWM") - base)
            kept.append(_status("VmRSS") - base)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return statistics.median(peaks[_WARM_UP:]), statistics.median(kept[_WARM_UP:])


def _status(name: str) -> float:
    """Return a size of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


if __name__ == "__main__":
    main()
