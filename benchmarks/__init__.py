"""Benchmarks against PyTorch DCP and the speed of the disk, in the same run: ``make bench``."""
