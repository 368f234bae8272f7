"""What shells offer where an argument is begun. Nothing here imports torch: a key was pressed, and somebody waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from holdfast.errors import HoldfastError
from holdfast.run.catalog import list_checkpoints
from holdfast.storage.posix import is_directory, local_path

#: What ``--to`` takes.
FORMATS = {
    "native": "a checkpoint of holdfast's",
    "hf": "a folder as transformers has it",
    "safetensors": "one such file",
    "torch": "one file of torch.save",
    "dcp": "a folder of torch.distributed.checkpoint",
    "lightning": "one .ckpt file",
    "lightning-folder": "as Lightning's FSDP and model-parallel strategies have it",
    "colossalai": "folders that ColossalAI's Booster loads",
    "nxd": "a tag's folder of NeuronX Distributed",
}

#: What ``--dtype`` takes.
DTYPES = (
    *("bfloat16", "float16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


def complete_formats(incomplete: str) -> list[tuple[str, str]]:
    """Formats, each with what it is."""
    return [(name, text) for name, text in FORMATS.items() if name.startswith(incomplete)]


def complete_dtypes(incomplete: str) -> list[str]:
    """Dtypes of floating-point tensors."""
    return [name for name in DTYPES if name.startswith(incomplete)]


def complete_checkpoints(incomplete: str) -> list[tuple[str, str]]:
    """The checkpoints of a run whose folder was typed, the newest first. Where there are none, shells offer files."""
    with suppress(HoldfastError, OSError):
        return list(_checkpoints(incomplete))
    return []


def _checkpoints(incomplete: str) -> Iterator[tuple[str, str]]:
    above, slash, begun = incomplete.rpartition("/")
    folder = local_path(above + slash or ".")
    for info in reversed(list_checkpoints(folder) if is_directory(folder) else []):
        if info.tag.startswith(begun):
            step = "" if info.step is None else f"step {info.step}, "
            yield f"{above}{slash}{info.tag}", f"{step}{info.status}"
