"""Detection of ranks that die between saves."""
