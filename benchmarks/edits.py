"""Edits of a checkpoint with optimizer states, against ``cp`` of the same bytes, and a script that loads everything.

All start with cold caches, and end when their output is durable. rankless verifies its input, and, unless disabled, its
output; the script and ``cp`` verify nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import rankless
from benchmarks import raw
from benchmarks.conversion import CP, Convert, measure_against_cp
from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.peers import OURS
from benchmarks.setting import Setting

#: The bytes of a layer, and the part of the parameters that embedding and head are.
_LAYER, _SHARE_OF_ROWS, _HIDDEN = 64 * 10**6, 0.2, 1024

#: How many rows are added.
_NEW_ROWS = 1000

#: The edits that are measured.
_EDITS = {
    "rename": ["rename ^layers=blocks"],
    "resize-vocab": ["resize-vocab {rows}"],
    "layers": ["layers drop=0"],
    "average": ["average 2"],
}


class _Lm(nn.Module):
    """Layers, and an embedding and a head with a row for each token."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        rows = max(8, int(nbytes * _SHARE_OF_ROWS) // (2 * 4 * _HIDDEN))
        self.embed_tokens, self.lm_head = nn.Embedding(rows, _HIDDEN), nn.Linear(_HIDDEN, rows, bias=False)
        count = max(2, int(nbytes * (1 - _SHARE_OF_ROWS)) // _LAYER)
        size = max(1, int(nbytes * (1 - _SHARE_OF_ROWS)) // count // (4 * _HIDDEN))
        self.layers = nn.ModuleList(nn.Linear(_HIDDEN, size, bias=False) for _ in range(count))


def measure_edits(setting: Setting) -> Iterator[Table]:
    """Measure each edit of a checkpoint, with and without reading the output back."""
    for folder, nbytes in ((setting.folder / "large", setting.nbytes), (setting.folder / "small", 10**6)):
        _save_source(folder / "run", nbytes)
    for limit in ("256MB", "1GB"):
        yield _measure_sharing(setting, limit)
    for name, texts in _EDITS.items():
        ours = partial(_edit, texts)
        converts: dict[str, Convert] = {OURS: ours, f"{OURS}, verify=False": partial(ours, verify=False)}
        if name == "resize-vocab":
            converts["a script with torch"] = _resize_in_memory
        yield from measure_against_cp(setting, f"edit, {name}", "run/step_2", converts)


def _measure_sharing(setting: Setting, limit: str) -> Table:
    """Measure an edit that changes the embedding and the head, beside ``cp`` of the files that it changes."""
    source, made, changed = (setting.folder / name for name in (f"large/{limit}", "made", "changed"))
    _save_source(source, setting.nbytes, limit)
    edit = partial(_edit, _EDITS["resize-vocab"], source / "step_2", made, max_shard_size=limit)
    raw.remove_path(made)
    edit()
    raw.remove_path(changed)
    changed.mkdir()
    for number, file in enumerate(sorted(made.rglob("*.safetensors"))):
        if file.stat().st_nlink == 1:
            shutil.copyfile(file, changed / str(number))
    raw.sync_tree(changed)
    share = _count_bytes(changed) / _count_bytes(made)

    def prepare(path: Path) -> None:
        raw.remove_path(made)
        raw.evict_from_cache(path)

    contenders = {
        OURS: Contender(edit, partial(prepare, source / "step_2")),
        f"{OURS}, verify=False": Contender(partial(edit, verify=False), partial(prepare, source / "step_2")),
        CP: Contender(partial(raw.copy_durably, changed, made), partial(prepare, changed)),
    }
    title = f"edit of the embedding, {setting.gigabytes} in files of {limit}, {share:.0%} changes, cold"
    table = time_interleaved(contenders, setting.rounds).build_table(title, (CP,))
    raw.remove_path(source)
    return table


def _count_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _edit(texts: list[str], source: Path, made: Path, *, verify: bool = True, max_shard_size: str = "1GB") -> None:
    rows = _count_rows(source) + _NEW_ROWS
    edits = [text.format(rows=rows) for text in texts]
    rankless.edit(source, made, edits, verify=verify, max_shard_size=max_shard_size)


def _count_rows(source: Path) -> int:
    for path in (source / "model").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if "embed_tokens.weight" in file.keys():  # noqa: SIM118 - it is no mapping
                return int(file.get_slice("embed_tokens.weight").get_shape()[0])
    raise FileNotFoundError(source)


def _resize_in_memory(source: Path, made: Path) -> None:
    """Do what people do: load all weights and moments, change them, save all."""
    for file in sorted(source.rglob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.startswith(("embed_tokens", "lm_head")) and tensor.ndim > 1:
                tensors[name] = torch.cat([tensor, tensor.mean(0, keepdim=True).expand(_NEW_ROWS, -1)])
        (made / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, made / file.relative_to(source))
    raw.sync_tree(made)


def _save_source(run: Path, nbytes: int, limit: str = "1GB") -> None:
    """Save two checkpoints of a training with AdamW: a third of the bytes are weights."""
    model = _Lm(nbytes // 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.rand_like(parameter),
            "exp_avg_sq": torch.rand_like(parameter),
        }
    for step in (1, 2):
        options = rankless.SaveOptions(incremental=False, max_shard_size=limit)
        rankless.save_checkpoint(run, f"step_{step}", model, optimizer, step=step, options=options)
