"""The command ``rankless show``: lists what a checkpoint contains."""
