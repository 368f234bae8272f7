"""The command line. There is one module per command; ``target`` and ``output`` are shared.

No module here imports torch at the top, so that ``--help``, ``ls`` and ``show`` are fast.

Each command runs in one process, without other ranks.
"""
