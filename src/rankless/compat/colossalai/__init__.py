"""The checkpoint interface of ColossalAI 0.5.0's Booster: change the import, and keep the training script.

Not affiliated with the owners of that name.
"""

from rankless.compat.colossalai.booster import Booster, CheckpointIO

__all__ = ["Booster", "CheckpointIO"]
