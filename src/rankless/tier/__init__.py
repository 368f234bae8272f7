"""The local tier: checkpoints in the memory of the hosts, and their way to the run directory."""
