"""Shell completion of arguments. No module here imports torch, because the user is waiting.

The shell runs it in a process of its own, whenever the user presses Tab.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from rankless.errors import RanklessError
from rankless.formats.registry import NOT_FOR_EDITS
from rankless.run.catalog import list_checkpoints
from rankless.storage.posix import is_directory, local_path

#: The formats of ``--to``, each with a description.
FORMATS = {
    "native": "a rankless checkpoint",
    "hf": "a Hugging Face model folder",
    "safetensors": "one safetensors file",
    "torch": "one file of torch.save",
    "dcp": "a folder of torch.distributed.checkpoint",
    "lightning": "one .ckpt file",
    "lightning-folder": "a folder of Lightning's FSDP and model-parallel strategies",
    "colossalai": "folders that ColossalAI's Booster loads",
    "deepspeed-universal": "a folder that DeepSpeed loads with load_universal_checkpoint",
    "peft": "the PEFT adapters alone",
    "megatron": "a run's folder of Megatron, torch_dist",
    "nxd": "the folder of a NeuronX Distributed tag",
}

#: The formats of ``--to`` of an edit.
EDIT_FORMATS = {name: text for name, text in FORMATS.items() if name not in NOT_FOR_EDITS}

#: The dtypes of ``--dtype``.
DTYPES = (
    *("bfloat16", "float16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


def complete_formats(incomplete: str) -> list[tuple[str, str]]:
    """Return the matching formats with their descriptions."""
    return [(name, text) for name, text in FORMATS.items() if name.startswith(incomplete)]


def complete_edit_formats(incomplete: str) -> list[tuple[str, str]]:
    """Return the matching formats of an edit with their descriptions."""
    return [choice for choice in complete_formats(incomplete) if choice[0] in EDIT_FORMATS]


def complete_dtypes(incomplete: str) -> list[str]:
    """Return the matching floating-point dtypes. For example, ``b`` matches ``bfloat16``."""
    return [name for name in DTYPES if name.startswith(incomplete)]


def complete_checkpoints(incomplete: str) -> list[tuple[str, str]]:
    """Return the checkpoints of the run with the typed folder, newest first. If none, shells complete file names."""
    with suppress(RanklessError, OSError):
        return list(_matching_checkpoints(incomplete))
    return []


def _matching_checkpoints(incomplete: str) -> Iterator[tuple[str, str]]:
    parent, slash, prefix = incomplete.rpartition("/")
    folder = local_path(parent + slash or ".")
    for info in reversed(list_checkpoints(folder) if is_directory(folder) else []):
        if info.tag.startswith(prefix):
            step = "" if info.step is None else f"step {info.step}, "
            yield f"{parent}{slash}{info.tag}", f"{step}{info.status}"
