"""Disk-fault campaign: each file system call of a save or load fails once.

It proves "Faults of the disk" of ``docs/failure-model.md``: all ranks raise one typed error, or the operation succeeds.
"""
