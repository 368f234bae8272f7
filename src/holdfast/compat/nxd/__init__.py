"""NxD's calls and its converter of ZeRO-1 states, for scripts and checkpoints that come from there."""
