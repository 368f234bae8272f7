"""Conversion of checkpoints of DeepSpeed and Megatron-LM with their optimizer states, against ``cp`` of the same bytes.

The tools of DeepSpeed are peers if DeepSpeed is on the path. ``zero_to_fp32`` writes the weights only, a third of the
bytes. ``ds_to_universal`` forks, so it runs in a process of its own, and its time contains the imports. Both compare
nothing. All start with cold caches, and end when their output is durable.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

import rankless
from benchmarks import raw
from benchmarks.conversion import CP, Convert
from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.peers import OURS
from benchmarks.process_timer import ProcessTimer, build_memory_table
from benchmarks.setting import Setting
from tests.helpers.deepspeed_files import random_save, write_zero
from tests.helpers.megatron_models import ARGS, save_flat, save_torch_dist

#: The rows and columns of each parameter.
ROWS, COLUMNS = 4096, 2048

#: The bytes of one element: a master weight and the two moments of Adam.
_ELEMENT_BYTES = 12

_TO_FP32 = "zero_to_fp32, weights only"
_TO_UNIVERSAL = "ds_to_universal"


def measure_foreign(setting: Setting) -> Iterator[Table]:
    """Measure ZeRO-3 of two ranks, and two forms of Megatron's states, whose weights are in the checkpoint twice."""
    none: Mapping[str, Convert] = {}
    deepspeed = find_spec("deepspeed") is not None
    to_fp32 = {_TO_FP32: _run_zero_to_fp32} if deepspeed else none
    to_universal = {_TO_UNIVERSAL: _run_ds_to_universal} if deepspeed else none
    for name, create, targets in (
        ("DeepSpeed's ZeRO-3", _create_zero3, {"native": to_fp32, "deepspeed-universal": to_universal}),
        ("Megatron's fully_reshardable", partial(_create_megatron, save_torch_dist), {"native": none}),
        ("Megatron's dp_zero_gather_scatter", partial(_create_megatron, save_flat), {"native": none}),
    ):
        source = setting.folder / "source"
        create(source, setting.nbytes)
        create(setting.folder / "small", 1)
        for to, peers in targets.items():
            yield from _measure_conversion(setting, f"{name}, {setting.gigabytes}", to, peers)
        raw.empty_directory(setting.folder)


def _measure_conversion(setting: Setting, name: str, to: str, peers: Mapping[str, Convert]) -> Iterator[Table]:
    source, small, made = (setting.folder / part for part in ("source", "small", "made"))
    convert = partial(rankless.convert, to=to)
    converts: dict[str, Convert] = {OURS: convert, f"{OURS}, verify=False": partial(convert, verify=False), **peers}
    jobs = {
        kind: ProcessTimer(
            partial(work, source, made), partial(_try_once, work, small, made), partial(_prepare, source, made)
        )
        for kind, work in converts.items()
    }
    contenders = {kind: job.build_contender() for kind, job in jobs.items()}
    contenders[CP] = Contender(partial(raw.copy_durably, source, made), partial(_prepare, source, made))
    yield time_interleaved(contenders, setting.rounds).build_table(f"conversion of {name} to {to}, cold", (CP,))
    measured = {kind: job for kind, job in jobs.items() if kind != _TO_UNIVERSAL}  # its memory is not this process's
    yield build_memory_table(f"memory of a conversion of {name} to {to}", measured)


def _prepare(source: Path, made: Path) -> None:
    raw.remove_path(made)
    raw.evict_from_cache(source)


def _try_once(work: Convert, source: Path, made: Path) -> None:
    """Convert a small checkpoint, so that all modules are imported."""
    raw.remove_path(made)
    work(source, made)
    raw.remove_path(made)


def _run_zero_to_fp32(source: Path, made: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import (  # noqa: PLC0415 - it may be missing
        convert_zero_checkpoint_to_fp32_state_dict,
    )

    convert_zero_checkpoint_to_fp32_state_dict(str(source), str(made), safe_serialization=True)
    raw.sync_tree(made)


def _run_ds_to_universal(source: Path, made: Path) -> None:
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    (step,) = source.glob("global_step*")
    subprocess.run([*tool, "--input_folder", step, "--output_folder", made], check=True, capture_output=True)
    raw.sync_tree(made)


def _create_zero3(folder: Path, nbytes: int) -> None:
    number = max(1, round(nbytes / (_ELEMENT_BYTES * ROWS * COLUMNS)))
    shapes = {f"w{n}": (ROWS, COLUMNS) if nbytes > 1 else (8, 4) for n in range(number)}
    save = random_save(shapes, [[*shapes]], ("exp_avg", "exp_avg_sq"), stage=3, ranks=2, step=torch.tensor(3.0))
    write_zero(folder, save)


def _create_megatron(save: Callable[..., object], folder: Path, nbytes: int) -> None:
    args = ARGS["gpt_neox"]
    rows = max(1, round(nbytes / ((_ELEMENT_BYTES + 4) * COLUMNS * args["num_layers"])))
    names = [f"decoder.layers.{number}.mlp.linear_fc1.weight" for number in range(args["num_layers"])]
    tensors = {name: torch.randn(rows, COLUMNS) for name in names}
    save(folder, tensors, args, dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), tensors))
