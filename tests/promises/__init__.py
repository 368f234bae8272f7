"""The promises of a save, each tested over every place where something can be saved.

A promise is one test. A place is where an output appears, and what writes it there: a folder, a bucket, a local tier in
front of one of them, or the writer of one framework. ``python -m tests.promises.table`` writes the lists in
``docs/promises.md``.
"""
