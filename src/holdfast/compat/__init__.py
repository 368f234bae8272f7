"""The calls of other systems, under their own names and arguments."""
