"""Random histories of a run over real places, with jobs that are killed and stopped, against an independent oracle."""
