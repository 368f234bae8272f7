"""The Booster of ColossalAI 0.5.0, as far as checkpoints go: change the import, and keep the script.

Not affiliated with the owners of that name.
"""

from holdfast.compat.colossalai.booster import Booster, CheckpointIO

__all__ = ["Booster", "CheckpointIO"]
