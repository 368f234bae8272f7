"""Access to the file system. No other package opens files."""
