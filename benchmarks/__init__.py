"""Side by side with PyTorch DCP and with the disk's own speed, in one run: ``make bench``."""
