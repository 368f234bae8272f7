"""The folders of Accelerate's ``save_state`` and of the checkpoints of transformers' ``Trainer``."""
