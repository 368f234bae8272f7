"""The command ``holdfast show``: lists what a checkpoint contains."""
