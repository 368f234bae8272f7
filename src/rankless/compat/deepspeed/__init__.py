"""Saves and loads of DeepSpeed engines: two calls instead of ``engine.save_checkpoint`` and ``engine.load_checkpoint``.

Checkpoints are rankless's own, and do not depend on the number of ranks or the stage of ZeRO. DeepSpeed is needed here,
and nowhere else in rankless. Not affiliated with the owners of that name.
"""

from rankless.compat.deepspeed.api import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
