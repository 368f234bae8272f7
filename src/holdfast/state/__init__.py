"""Training objects on one side, named runs and plain values on the other. No file is touched here."""
