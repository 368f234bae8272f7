"""The local tier: checkpoints in the memory of the hosts, and their way to the run directory.

A staged save is a set of ranges of the final files. The tier stages it into mapped files of a folder on each host, with
a table of the ranges and their CRCs: any parts with one id that cover all files are a checkpoint, wherever they are.
There is no daemon, no socket and no pickled state.
"""
