"""An accelerator for tests, which runs what was enqueued only when a test lets it: see ``device.py``."""
