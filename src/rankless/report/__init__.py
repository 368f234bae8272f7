"""Reports: what a run, a checkpoint, or the difference of two looks like, as one HTML page that needs no network."""
