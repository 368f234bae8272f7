"""Saves and loads of DeepSpeed engines: two calls instead of ``engine.save_checkpoint`` and ``engine.load_checkpoint``.

Checkpoints are holdfast's own, and do not depend on the number of ranks or the stage of ZeRO. DeepSpeed is needed here,
and nowhere else in holdfast. Not affiliated with the owners of that name.
"""

from holdfast.compat.deepspeed.api import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
