"""torchtitan's checkpoint manager with rankless's checkpoints: ``config.checkpoint = CheckpointManager.Config(...)``.

All options of torchtitan's own manager keep their meaning. A run resumes on any number of ranks, and from checkpoints
of torchtitan and of Hugging Face.
"""

from rankless.torchtitan.manager import CheckpointManager

__all__ = ["CheckpointManager"]
