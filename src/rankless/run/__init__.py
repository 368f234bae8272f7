"""The folder of a training run: its checkpoints, their order, retention and cleanup."""
