"""Histories of a run with a local tier: jobs that are killed, stopped and continued, and what the next one must load.

A host is a letter: a folder for its tier, and the host's id that its ranks see. So a history takes seconds, and needs
no namespaces. Each incarnation of the job saves states that are a function of the incarnation and the step, and notes
what it was told about them. From the notes follows what the next incarnation must load.
"""
