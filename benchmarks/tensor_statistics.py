"""Statistics of tensors from a cold disk, against a verification, and a bare loop of the same work without CRCs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

import rankless
from benchmarks import raw
from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.peers import OURS
from benchmarks.setting import Setting

#: The number of tensors.
_TENSORS = 20

_VERIFY, _BARE = "rankless verify", "bare NumPy loop"


def measure_statistics(setting: Setting) -> Iterator[Table]:
    """Measure a checkpoint in float32, and one in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        run, size = setting.folder / "run", setting.nbytes // dtype.itemsize // _TENSORS
        rankless.save_checkpoint(run, "a", {f"w{n}": torch.randn(size).to(dtype) for n in range(_TENSORS)})
        files = sorted((run / "a").rglob("*.safetensors"))
        evict = partial(raw.evict_from_cache, run)
        contenders = {
            f"{OURS} stats": Contender(partial(rankless.compute_statistics, run), evict),
            _VERIFY: Contender(partial(_verify, run), evict),
            _BARE: Contender(partial(_measure_files, files, dtype), evict),
        }
        clock = time_interleaved(contenders, setting.rounds)
        title = f"statistics of {setting.gigabytes} in {str(dtype).removeprefix('torch.')}, cold"
        yield clock.build_table(title, (_VERIFY,))
        yield clock.build_processor_table(f"CPU time of {title}", setting.nbytes / 1e9)
        raw.empty_directory(setting.folder)


def _verify(run: Path) -> None:
    list(rankless.open(run).verify())


def _measure_files(files: Sequence[Path], dtype: torch.dtype) -> None:
    """Compute the same numbers of all bytes of files, in chunks."""
    chunks = [(file, offset) for file in files for offset in range(0, file.stat().st_size, raw.CHUNK)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda chunk: _measure_chunk(chunk[0], chunk[1], dtype), chunks))


def _measure_chunk(file: Path, offset: int, dtype: torch.dtype) -> tuple[object, ...]:
    data = np.fromfile(file, np.uint8, raw.CHUNK, offset=offset)
    data = data[: len(data) // 4 * 4]
    floats = data.view("f4") if dtype == torch.float32 else (data.view("u2").astype("u4") << 16).view("f4")
    values = floats.astype("f8")
    is_finite = np.isfinite(values)
    finite = values if is_finite.all() else values[is_finite]
    histogram = np.bincount(floats.view("u4") >> 23, minlength=512)
    return finite.min(), finite.max(), finite.sum(), finite.std(), np.count_nonzero(finite == 0), histogram
