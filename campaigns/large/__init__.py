"""Large-size campaign: a model larger than a rank's share of memory, and a tensor larger than 2 GiB.

It proves that loading needs a rank's shards and little more memory (``docs/performance.md``).
"""
