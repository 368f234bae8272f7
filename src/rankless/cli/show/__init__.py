"""The command ``rankless show``: lists the contents of a checkpoint."""
