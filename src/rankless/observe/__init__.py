"""Logs, events, progress bars and warnings."""
