"""The command line. One module per command; what they share is in ``target`` and ``output``.

Nothing here imports torch at the top: ``--help``, ``ls`` and ``show`` answer at once.
"""
