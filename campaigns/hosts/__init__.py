"""Several kernels on one machine: a test bed of hosts with page caches, locks and clocks of their own.

Each host is a User Mode Linux kernel, which boots in seconds as a process and uses this machine's files. One host
serves a folder over NFS, the others mount it. ``docs/test-bed.md`` explains it.
"""
