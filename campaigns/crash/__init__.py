"""A crash anywhere leaves the old or the new checkpoint: every save is cut at every operation, and looked at."""
