"""Pages of runs of 20,000 tensors, from made-up data: no checkpoint of this size is needed."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from rankless.inspection.tensor_statistics import BUCKETS, ZERO_BUCKET, TensorStatistics
from rankless.ondisk.data_files import TensorInfo
from rankless.report.compaction import sample_evenly
from rankless.report.page import render_page
from rankless.report.statistics import statistics_columns
from rankless.report.tensor_columns import NamedTensor, tensor_columns
from rankless.report.timeline import build_timeline
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.journal import JournalEntry

PLACEMENT = tuple((f"gpu-node-{number:03}.cluster.internal", 8) for number in range(8))
PHASES = (
    ("prepare", 0.012345),
    ("copy", 0.123456),
    ("replicate", 1.234567),
    ("write", 10.954321),
    ("commit", 0.020989),
)


def measure(values: np.ndarray) -> TensorStatistics:
    """Statistics of a few numbers, by hand."""
    finite = values[np.isfinite(values)]
    counts = [0] * BUCKETS
    for value in finite:
        if value:
            counts[ZERO_BUCKET + int(math.copysign(math.floor(math.log2(abs(value))) + 65, value))] += 1
        else:
            counts[ZERO_BUCKET] += 1
    nans = int(np.isnan(values).sum())
    infinities = int(np.isinf(values).sum())
    norm = float(np.sqrt((finite**2).sum()))
    low, high = (float(finite.min()), float(finite.max()))
    return TensorStatistics(len(values), nans, infinities, 0, 0, low, high, 0.0, norm, 0.0, tuple(counts))


def make_large_page(checkpoints: int) -> bytes:
    """The page of a run with statistics of 20 checkpoints, 300 checkpoints in the table, and 1,000 events at most."""
    numbers = np.random.default_rng(0)
    names = [f"model.layers.{i // 128}.mlp.experts.{i // 4 % 32}.{'abcd'[i % 4]}_proj.weight" for i in range(20_000)]
    tensors = [NamedTensor("model", name, TensorInfo("BF16", (4096, 64 * (i % 9 + 1)))) for i, name in enumerate(names)]
    pool = [measure(numbers.normal(size=300) * 10 ** numbers.uniform(-4, 2)) for _ in range(300)]
    history = [
        (f"step_{step}", {f"model/{name}": pool[(i * 7 + step) % 300] for i, name in enumerate(names)})
        for step in range(20)
    ]
    infos = [
        CheckpointInfo(f"step_{i * 1000}", Path(f"/runs/a/step_{i}"), step=i, time=1.7e9 + i, run="0" * 16, id="1" * 16)
        for i in range(checkpoints)
    ]
    save = JournalEntry(
        "saved", 0.0, "", None, "0" * 16, 64, 8, 0.123456, 12.345678, 10**11, 10**10, "", PLACEMENT, PHASES
    )
    journal = [msgspec.structs.replace(save, time=info.time, tag=info.tag, step=info.step) for info in infos]
    shown = sample_evenly(infos, 300)
    return render_page(
        "a",
        {
            "kind": "run",
            "path": "/runs/a",
            "made": 1.7e9,
            "format": "rankless",
            "nbytes": 10**11,
            "step": checkpoints - 1,
            "saved": 1.7e9,
            "world_size": 64,
            "findings": [],
            "notes": [],
            "verified": {},
            "focus": infos[-1].tag,
            "checkpoints": [
                [each.tag, each.status, each.step, each.time, 64, each.run, 10**11, 10**11, [], {"loss": 0.1}, "", True]
                for each in shown
            ],
            "checkpoints_omitted": len(infos) - len(shown),
            "timeline": build_timeline(infos, journal, 1000).as_record(),
            "tensors": tensor_columns(tensors),
            "before": infos[-2].tag,
            "sharing": "c" * len(tensors),
            "statistics": statistics_columns(tensors, history),
            "statistics_omitted": len(infos) - 20,
        },
    )
