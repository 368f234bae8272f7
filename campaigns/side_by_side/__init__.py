"""Jobs side by side at one run's folder: some save, overwrite and remove, the others must never see half of it."""
