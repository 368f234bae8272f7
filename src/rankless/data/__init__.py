"""Data loading whose position does not depend on the number of ranks."""
