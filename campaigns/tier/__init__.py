"""The local tier on several hosts: a demo, and measurements.

A host is a set of namespaces of this machine: it has its own processes, network device and ``/dev/shm``, and can be
destroyed at once. All hosts share one kernel, and a disk of limited speed. ``docs/test-bed.md`` explains it.
"""
