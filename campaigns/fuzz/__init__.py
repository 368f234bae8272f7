"""Checkpoints of every format, changed at random: each is read, or refused by an error of ours."""
