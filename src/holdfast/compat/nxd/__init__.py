"""NxD's calls, for training scripts that come from there: ``import holdfast.compat.nxd as nxd``, and nothing else.

Saves are checkpoints of holdfast's, which any number of ranks load in any layout; ``holdfast convert --to nxd`` makes
NxD's of them. Checkpoints that NxD has written are loaded as they are. Nothing here needs torch_xla.
"""

from holdfast.compat.nxd.api import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from holdfast.compat.nxd.model_sharding import sharding_of

__all__ = ["finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint", "sharding_of"]
