"""Saves a checkpoint: checks the request, agrees on a plan, writes, commits; in the background if asked."""
